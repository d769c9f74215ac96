"""Dense all-reduce: the baseline, through the same pipeline as everything else.

1. Sum all elements over all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from gradsieve.comm.ops import AllReduce
from gradsieve.schemes.base import Scheme
from gradsieve.types import Ctx, Outcome, Program, Sparse


@dataclass(frozen=True)
class State:
    """Nothing to remember."""


@dataclass(frozen=True, kw_only=True)
class Dense(Scheme[State]):
    density: float = 1.0

    lossless: ClassVar[bool] = True

    def begin(self, n: int, world: int, previous: State | None = None) -> State:
        return State()

    def step(self, acc: Tensor, state: State, ctx: Ctx) -> Program[Outcome[State]]:
        # 1.
        total = yield AllReduce(acc.clone())
        return Outcome(Sparse.full(total), Sparse.full(acc), state)

    def expected_words(self, n: int, world: int, imbalance: float = 1.0) -> float:
        return 2.0 * n * (world - 1) / world
