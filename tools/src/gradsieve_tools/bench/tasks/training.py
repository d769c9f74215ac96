"""Six models to train to the end, for the question whether sparse exchange leaves them as good.

    mlp           Fashion-MNIST, SGD with momentum              test accuracy
    cnn           Fashion-MNIST, batch norm, SGD with momentum  test accuracy
    transformer   bytes of source text, AdamW                   loss on unseen files
    lstm          bytes of source text, AdamW                   loss on unseen files
    recommender   who likes what: embedding tables, AdamW       loss on unseen pairs
    documentation byte pairs of Debian's documentation, AdamW   loss on unseen files

The last one is held out: no setting of gradsieve is chosen on it, and `--tasks all` leaves it out.
Learning rates and weight decays were tuned for dense training (benchmarks/tune_dense.py) and then frozen. A
sync has a rate of its own only as a multiple that is asked for, the same choice for all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from gradsieve.errors import ConfigError
from gradsieve_tools.bench.common.models import Transformer
from gradsieve_tools.bench.tasks import documentation as documents
from gradsieve_tools.bench.tasks.data import (
    CONTEXT,
    ITEMS,
    USERS,
    Data,
    DataSet,
    fashion_mnist,
    ratings,
    source_text,
)

Metric = Literal["accuracy", "loss"]
BETTER: dict[Metric, int] = {"accuracy": 1, "loss": -1}
WARM_UP = 0.05  # part of the steps in which the learning rate rises
_EVALUATED_AT_ONCE = 512


@dataclass(frozen=True, slots=True)
class Training:
    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: LRScheduler  # stepped once a step
    train: Data
    test: Data
    kind: Tensor  # kind of every training example: see `shards`
    loss: Callable[[Tensor, Tensor], Tensor]
    batch: int  # examples in a step, over all ranks together
    steps: int
    metric: Metric

    @property
    def n(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    def evaluate(self) -> float:
        """The metric on the test examples."""
        was_training = self.model.training
        self.model.eval()
        value = self.evaluate_as_is()
        self.model.train(was_training)
        return value

    def evaluate_as_is(self) -> float:
        """Return the metric without a change of the model's mode."""
        total = 0.0
        with torch.no_grad():
            for begin in range(0, len(self.test), _EVALUATED_AT_ONCE):
                part = self.test.take(slice(begin, begin + _EVALUATED_AT_ONCE))
                total += self._evaluate(part) * len(part)
        return total / len(self.test)

    def _evaluate(self, part: Data) -> float:
        answer: Tensor = self.model(*part.inputs)
        if self.metric == "accuracy":
            answer = (answer.argmax(1) == part.target).float().mean()
        else:
            answer = self.loss(answer, part.target)
        return float(answer)


class _LSTM(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.symbols = nn.Embedding(256, width)
        self.lstm = nn.LSTM(width, hidden, batch_first=True)
        self.head = nn.Linear(hidden, 256)

    def forward(self, text: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.symbols(text))
        scores: Tensor = self.head(hidden)
        return scores.transpose(1, 2)  # classes second, as cross_entropy wants them


class _Recommender(nn.Module):
    """Two embedding tables, and a small head that sees both rows and how they match."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(USERS, width), nn.Embedding(ITEMS, width)
        for table in (self.users, self.items):
            nn.init.normal_(table.weight, std=0.1)
        self.head = nn.Sequential(nn.Linear(3 * width, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        taste, trait = self.users(user), self.items(item)
        score: Tensor = self.head(torch.cat([taste, trait, taste * trait], dim=1))
        return score.flatten()


def mlp(width: int = 512) -> nn.Module:
    relu = nn.ReLU()
    layers = nn.Linear(784, width), relu, nn.Linear(width, width), relu, nn.Linear(width, 10)
    return nn.Sequential(nn.Flatten(), *layers)


def _cnn() -> nn.Module:
    relu = nn.ReLU()
    # Strides rather than pooling: as good for half the time.
    first = nn.Conv2d(1, 16, 5, stride=2, padding=2), nn.BatchNorm2d(16), relu
    second = nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), relu
    head = nn.Flatten(), nn.Linear(32 * 7 * 7, 128), relu, nn.Linear(128, 10)
    return nn.Sequential(*first, *second, *head)


def transformer(width: int = 128, context: int = CONTEXT, symbols: int = 256) -> nn.Module:
    model = Transformer(width, 2, context, symbols)
    # Places as loud as symbols: next to symbols of deviation 1 they take hundreds of steps to be heard.
    for table in (model.symbols.weight, model.places):
        nn.init.normal_(table, std=0.1)
    return model


def rate_at(step: int, steps: int) -> float:
    """Part of the highest learning rate: up in a line, then down along a cosine, nearly to zero."""
    warm = max(1, round(WARM_UP * steps))
    if step < warm:
        return (step + 1) / (warm + 1)
    return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


@dataclass(frozen=True, slots=True)
class Recipe:
    name: str
    model: Callable[[], nn.Module]
    data: Callable[[], DataSet]
    batch: int
    rate: float
    steps: int = 2000
    optimizer: Literal["sgd", "adamw"] = "adamw"
    decay: float = 0.1
    metric: Metric = "loss"
    loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy
    rate_at: Callable[[int, int], float] = rate_at  # part of `rate`, by step and steps
    held_out: bool = False  # nothing of gradsieve is chosen on it

    def __call__(
        self, seed: int, steps: int | None = None, batch: int | None = None, rate: float = 1.0
    ) -> Training:
        """`steps` other than the recipe's: the learning rate is made for that many. `rate` times its rate."""
        data, total = self.data(), self.steps if steps is None else steps
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = self.model()
        optimizer = self._optimizer(model, rate * self.rate)
        schedule = LambdaLR(optimizer, lambda step: self.rate_at(step, total))
        return Training(
            self.name,
            model,
            optimizer,
            schedule,
            data.train,
            data.test,
            data.kind,
            self.loss,
            batch or self.batch,
            total,
            self.metric,
        )

    def _optimizer(self, model: nn.Module, rate: float) -> torch.optim.Optimizer:
        if self.optimizer == "sgd":
            return torch.optim.SGD(model.parameters(), rate, momentum=0.9, weight_decay=self.decay)
        return torch.optim.AdamW(model.parameters(), rate, weight_decay=self.decay)


_EPOCH = 60_000 // 128
_SGD: dict[str, Any] = {"batch": 128, "optimizer": "sgd", "rate": 0.1, "decay": 1e-4, "metric": "accuracy"}
_RECIPES = (
    Recipe("mlp", mlp, fashion_mnist, steps=20 * _EPOCH, **_SGD),
    Recipe("cnn", _cnn, fashion_mnist, steps=10 * _EPOCH, **_SGD),
    Recipe("transformer", transformer, source_text, batch=16, rate=4e-3),
    Recipe("lstm", lambda: _LSTM(width=64, hidden=256), source_text, batch=16, rate=32e-3),
    Recipe(
        *("recommender", lambda: _Recommender(width=64, hidden=64), ratings),
        batch=512,
        rate=2e-2,
        steps=3000,
        loss=binary_cross_entropy_with_logits,
    ),
    Recipe(
        *(
            "documentation",
            lambda: transformer(168, documents.CONTEXT, documents.SYMBOLS),
            documents.documentation,
        ),
        batch=64,
        rate=4e-3,
        held_out=True,
    ),
)
TASKS = {recipe.name: recipe for recipe in _RECIPES}


def build(
    name: str, seed: int, steps: int | None = None, batch: int | None = None, rate: float = 1.0
) -> Training:
    """The task of that name, its model the same for the same seed. The caller's random numbers are left
    alone."""
    if name not in TASKS:
        raise ConfigError(f"there is no task {name!r}; choose from {', '.join(TASKS)}")
    return TASKS[name](seed, steps, batch, rate)


def shards(training: Training, world: int, mixed: bool = True) -> list[Tensor]:
    """The training examples that each rank owns: all of them, each once.

    Not mixed, every rank has its own kinds: classes of image, stretches of the text, users.
    """
    if mixed:
        random = torch.Generator().manual_seed(0)
        count = len(training.train)
        order = torch.randperm(count, dtype=torch.int64, device=random.device, generator=random)
    else:
        order = training.kind.argsort(stable=True)
    return list(order.tensor_split(world))


def batches(shard: Tensor, per_rank: int, seed: int) -> Iterator[Tensor]:
    """Endlessly the examples of a rank's next step: the whole shard, shuffled again every time round."""
    random = torch.Generator().manual_seed(seed)
    waiting = shard[:0]
    while True:
        order = torch.randperm(len(shard), dtype=torch.int64, device=random.device, generator=random)
        waiting = torch.cat([waiting, shard[order]])
        while len(waiting) >= per_rank:
            yield waiting[:per_rank]
            waiting = waiting[per_rank:]
