"""No communication at all: every rank keeps its own gradient. The limit that the other schemes chase.

Replicas drift apart, so this is for measuring only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from gradsieve.schemes.base import Scheme
from gradsieve.types import Ctx, Outcome, Program, Sparse


@dataclass(frozen=True)
class State:
    """Nothing to remember."""


@dataclass(frozen=True, kw_only=True)
class Noop(Scheme[State]):
    density: float = 1.0

    lossless: ClassVar[bool] = True
    silent: ClassVar[bool] = True

    def begin(self, n: int, world: int, previous: State | None = None) -> State:
        return State()

    def step(self, acc: Tensor, state: State, ctx: Ctx) -> Program[Outcome[State]]:
        yield from ()  # a generator that asks for nothing
        return Outcome(Sparse.full(acc), Sparse.full(acc), state)

    def expected_words(self, n: int, world: int, imbalance: float = 1.0) -> float:
        return 0.0
