"""Three small models with real data, whose gradients `bench schemes` records.

    cnn           a convolutional network on Fashion-MNIST images
    transformer   a byte-level causal language model on the source text of Python's standard library
    recommender   matrix factorisation: which source file (user) uses which word (item)

The recommender stands for models that are mostly embedding tables. No ratings come with an operating system,
so it learns from the same source files: few words are used everywhere and most hardly ever, as with goods in
a shop. Words are numbered as they first appear.
"""

from __future__ import annotations

import gzip
import keyword
import re
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from gradsieve.errors import ConfigError

FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")
SOURCES = Path(sysconfig.get_path("stdlib"))
_WORD = re.compile(r"[A-Za-z_]\w{2,}")


@dataclass(frozen=True, slots=True)
class Task:
    """A model, and examples to learn from: `loss(model(*inputs), target)` of a batch of them."""

    model: nn.Module
    inputs: tuple[Tensor, ...]
    target: Tensor
    loss: Callable[[Tensor, Tensor], Tensor]
    batch: int  # examples that one rank sees in a step
    rate: float  # step length of plain SGD with which the model learns

    @property
    def n(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())


def cnn(folder: Path = FASHION_MNIST, *, width: int = 256, images: int = 20_000, batch: int = 32) -> Task:
    """Two convolutions and a hidden layer of `width`."""
    pixels, labels = (values[:images] for values in read_images("train", folder))
    relu = nn.ReLU()
    first = nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), relu, nn.MaxPool2d(2)
    second = nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), relu, nn.MaxPool2d(2)
    head = nn.Flatten(), nn.Linear(32 * 7 * 7, width), relu, nn.Linear(width, 10)
    model, inputs = nn.Sequential(*first, *second, *head), (scaled(pixels).view(-1, 1, 28, 28),)
    return Task(model, inputs, labels, cross_entropy, batch, rate=0.05)


def read_images(part: str, folder: Path = FASHION_MNIST) -> tuple[Tensor, Tensor]:
    """Pixels as bytes, one image a row, and labels; `part` is train or t10k."""
    pixels = _idx(folder / f"{part}-images-idx3-ubyte.gz", header=16).view(-1, 28 * 28)
    return pixels, _idx(folder / f"{part}-labels-idx1-ubyte.gz", header=8).long()


def scaled(pixels: Tensor) -> Tensor:
    # Mean and deviation of the data set; in place, because every rank of a bench has all images.
    return pixels.float().div_(255).sub_(0.286).div_(0.353)


def _idx(path: Path, header: int) -> Tensor:
    try:
        content = gzip.decompress(path.read_bytes())
    except (OSError, EOFError) as error:
        raise ConfigError(
            f"this learns from the images of Fashion-MNIST, but {error}; to install them: "
            "apt-get install dataset-fashion-mnist (or choose what learns from something else)"
        ) from error
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)[header:]


class Transformer(nn.Module):
    def __init__(self, width: int, layers: int, context: int, symbols: int = 256) -> None:
        super().__init__()
        self.symbols = nn.Embedding(symbols, width)
        places = torch.randn(context, width, dtype=torch.float32, device="cpu")
        self.places = nn.Parameter(places * 0.02)
        each = [
            nn.TransformerEncoderLayer(
                width, nhead=4, dim_feedforward=4 * width, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(layers)
        ]
        self.layers = nn.ModuleList(each)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, symbols)
        self.past_only: Tensor
        self.register_buffer("past_only", nn.Transformer.generate_square_subsequent_mask(context))

    def forward(self, text: Tensor) -> Tensor:
        hidden = self.symbols(text) + self.places
        for layer in self.layers:
            hidden = layer(hidden, src_mask=self.past_only, is_causal=True)
        scores: Tensor = self.head(self.norm(hidden))
        return scores.transpose(1, 2)  # classes second, as cross_entropy wants them


def transformer(
    *, width: int = 128, layers: int = 2, context: int = 64, batch: int = 4, most_bytes: int = 2_000_000
) -> Task:
    text = torch.frombuffer(bytearray(b"".join(sources(most_bytes))), dtype=torch.uint8).long()
    windows = text[: len(text) - len(text) % (context + 1)].view(-1, context + 1)
    model = Transformer(width, layers, context)
    return Task(model, (windows[:, :-1],), windows[:, 1:], cross_entropy, batch, rate=0.05)


class _Recommender(nn.Module):
    """Matrix factorisation: how well two embeddings match, and how common the item is."""

    def __init__(self, users: int, items: int, width: int) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(users, width), nn.Embedding(items, width)
        self.common = nn.Embedding(items, 1)
        for table, deviation in ((self.users, 0.1), (self.items, 0.1), (self.common, 0.0)):
            nn.init.normal_(table.weight, std=deviation)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        match = (self.users(user) * self.items(item)).sum(1)
        score: Tensor = match + self.common(item).flatten()
        return score


def recommender(
    *, width: int = 32, items: int = 10_000, batch: int = 1024, most_bytes: int = 6_000_000
) -> Task:
    users, words, used = interactions(sources(most_bytes), items)
    model = _Recommender(int(users.max()) + 1, int(words.max()) + 1, width)
    return Task(model, (users, words), used, binary_cross_entropy_with_logits, batch, rate=100.0)


def interactions(files: list[bytes], items: int) -> tuple[Tensor, Tensor, Tensor]:
    """(file, word, 1) for every use of one of the `items` most common words, and (file, word, 0) for a word
    drawn for each of them that the file does not use."""
    texts = [_WORD.findall(file.decode(errors="replace")) for file in files]
    common = Counter(word for text in texts for word in text if not keyword.iskeyword(word))
    kept = {word for word, _ in common.most_common(items)}
    number = {word: place for place, word in enumerate(word for word in common if word in kept)}
    pairs = [(user, number[word]) for user, text in enumerate(texts) for word in text if word in number]
    user, word = torch.tensor(pairs, dtype=torch.int64, device="cpu").T
    random = torch.Generator().manual_seed(0)
    offered = torch.randint(len(number), user.shape, dtype=user.dtype, device=user.device, generator=random)
    unused = ~torch.isin(user * len(number) + offered, user * len(number) + word)
    used = torch.cat([torch.ones_like(user), torch.zeros_like(user[unused])]).float()
    # Shuffled, so that every rank's share has some of every file.
    order = torch.randperm(len(used), dtype=torch.int64, device=used.device, generator=random)
    users, words = torch.cat([user, user[unused]]), torch.cat([word, offered[unused]])
    return users[order], words[order], used[order]


def sources(most_bytes: int, folder: Path = SOURCES) -> list[bytes]:
    """Source files of the standard library in the order of their names, as many as `most_bytes` hold."""
    # Only places where the library's own modules can be: other packages are installed next to them. Its tests
    # do not come with every Python.
    names = sys.stdlib_module_names - {"test"}
    places = {path for name in names for path in (folder / f"{name}.py", *(folder / name).rglob("*.py"))}
    files: list[bytes] = []
    for path in sorted(places):
        if not path.is_file() or {"test", "tests"} & set(path.relative_to(folder).parts):
            continue
        content = path.read_bytes()
        most_bytes -= len(content)
        if most_bytes < 0:
            break
        files.append(content)
    if not files:
        raise ConfigError(
            f"no source files of Python's standard library are in {folder}: the models transformer and "
            "recommender learn from them; use a Python with its library as files, or --models cnn"
        )
    return files


MODELS: dict[str, Callable[[], Task]] = {"cnn": cnn, "transformer": transformer, "recommender": recommender}


def build(model: str, seed: int = 0) -> Task:
    """The task of that name, its model the same in every run. The caller's random numbers are left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return MODELS[model]()
