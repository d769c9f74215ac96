"""Dense all-reduce: the baseline, through the same pipeline as everything else.

1. Sum all elements over all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from gradsieve.comm.ops import AllReduce
from gradsieve.schemes.base import Scheme, Stateless
from gradsieve.types import Ctx, Outcome, Program, Sparse


@dataclass(frozen=True, kw_only=True)
class Dense(Scheme[Stateless]):
    density: float = 1.0

    lossless: ClassVar[bool] = True

    def begin(self, n: int, world: int, previous: Stateless | None = None) -> Stateless:
        return Stateless()

    def step(self, acc: Tensor, state: Stateless, ctx: Ctx) -> Program[Outcome[Stateless]]:
        # 1.
        total = yield AllReduce(acc.clone())
        return Outcome(Sparse.full(total), Sparse.full(acc), state)
