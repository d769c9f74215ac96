"""What the training tasks learn from, and what they are evaluated on.

    fashion_mnist   60,000 images to train, 10,000 to test
    source_text     bytes of Python's standard library; every tenth file is held out for the test
    ratings         generated: does this user like this item?

Everything is read or generated once in a process, and is the same whatever the seed of a run.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from gradsieve_tools.bench.common.models import FASHION_MNIST, read_images, scaled, sources

CONTEXT = 64  # bytes that a language model sees at once
USERS = ITEMS = 5_000
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Data:
    """Examples on which to train or to evaluate."""

    inputs: tuple[Tensor, ...]
    target: Tensor

    def __len__(self) -> int:
        return len(self.target)

    def take(self, which: Tensor | slice) -> Data:
        return Data(tuple(values[which] for values in self.inputs), self.target[which])


@dataclass(frozen=True, slots=True)
class DataSet:
    """Examples to train and to test, apart; `kind` is the sort of every training example: its class, the
    place of its text, its user."""

    train: Data
    test: Data
    kind: Tensor


@cache
def fashion_mnist(folder: Path = FASHION_MNIST) -> DataSet:
    train, test = _images(folder, "train"), _images(folder, "t10k")
    return DataSet(train, test, kind=train.target)


def _images(folder: Path, part: str) -> Data:
    pixels, labels = read_images(part, folder)
    return Data((scaled(pixels).view(-1, 1, 28, 28),), labels)


@cache
def source_text(most_bytes: int = 16_000_000, windows: int = 1024) -> DataSet:
    """Windows of CONTEXT bytes."""
    learned, held_out = apart(sources(most_bytes))
    return text_to_learn(_symbols(learned), _symbols(held_out), CONTEXT, windows)


def text_to_learn(learned: Tensor, held_out: Tensor, context: int, windows: int) -> DataSet:
    """Windows of `context` symbols, each to be predicted from those before it; `windows` of the test's, from
    all over the text held out."""
    train, test = _windows(learned, context), _windows(held_out, context)
    spread = torch.linspace(0, len(test) - 1, min(windows, len(test)), dtype=torch.float32, device=_CPU)
    place = torch.arange(len(train), dtype=torch.int64, device=_CPU)
    return DataSet(train, test.take(spread.long()), kind=place)


def apart(files: list[bytes]) -> tuple[list[bytes], list[bytes]]:
    """Files to learn from, and every tenth one that is not among them: the test is of unseen text."""
    held_out = files[9::10]
    unseen = set(held_out)  # by content: copies of a file are held out with it
    return [file for file in files if file not in unseen], held_out


def _symbols(files: list[bytes]) -> Tensor:
    return torch.frombuffer(bytearray(b"".join(files)), dtype=torch.uint8)


def _windows(text: Tensor, context: int) -> Data:
    windows = text[: len(text) - len(text) % (context + 1)].long().view(-1, context + 1)
    return Data((windows[:, :-1],), windows[:, 1:])


@cache
def ratings(drawn: int = 1_500_000, tested: int = 50_000) -> DataSet:
    """Draw users and items by Zipf's law and rate them by a hidden model of 4 factors, each pair once."""
    random = torch.Generator().manual_seed(0)
    user, item = _zipf(USERS, 0.8, drawn, random), _zipf(ITEMS, 1.0, drawn, random)
    pairs = torch.unique(user * ITEMS + item)
    pairs = pairs[torch.randperm(len(pairs), dtype=torch.int64, device=_CPU, generator=random)]
    user, item = pairs // ITEMS, pairs % ITEMS

    tastes, traits, common = (
        torch.randn(shape, dtype=torch.float32, device=_CPU, generator=random)
        for shape in ((USERS, 4), (ITEMS, 4), (ITEMS,))
    )
    score = (tastes[user] * traits[item]).sum(1) + common[item]
    chance = torch.rand(len(score), dtype=torch.float32, device=_CPU, generator=random)
    liked = (chance < score.sigmoid()).float()

    every = Data((user, item), liked)
    train, test = every.take(slice(tested, None)), every.take(slice(tested))
    return DataSet(train, test, kind=train.inputs[0])


def _zipf(count: int, exponent: float, drawn: int, random: torch.Generator) -> Tensor:
    """Numbers below `count`, the i-th of them (i from 1) with a chance proportional to 1 / i^exponent."""
    place = torch.arange(1, count + 1, dtype=torch.float64, device=_CPU)
    reached = (place**-exponent).cumsum(0)
    chance = torch.rand(drawn, dtype=torch.float64, device=_CPU, generator=random)
    return torch.searchsorted(reached, chance * reached[-1])
