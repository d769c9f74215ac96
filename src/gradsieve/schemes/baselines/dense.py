"""Dense all-reduce: the baseline, through the same pipeline as everything else.

1. Sum all elements over all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradsieve.comm.ops import AllReduce, Op
from gradsieve.schemes.base import Scheme, Stateless, blank, log2_ceil
from gradsieve.types import Ctx, Outcome, Program, Sparse


@dataclass(frozen=True, kw_only=True)
class Dense(Scheme[Stateless]):
    density: float = 1.0

    lossless: ClassVar[bool] = True
    looks: ClassVar[float] = 0.0
    merges: ClassVar[float] = 0.0

    def begin(self, n: int, world: int, previous: Stateless | None = None) -> Stateless:
        return Stateless()

    def step(self, acc: Tensor, state: Stateless, ctx: Ctx) -> Program[Outcome[Stateless]]:
        # 1.
        total = yield AllReduce(acc.clone())
        return Outcome(Sparse.full(total), Sparse.full(acc), state)

    def asks(self, n: int, world: int) -> Sequence[Op]:
        return [AllReduce(blank(n, torch.float32))]

    def expected_words(self, n: int, world: int, state: Stateless | None = None) -> float:
        return 2.0 * n * (world - 1) / world

    def expected_rounds(self, n: int, world: int, state: Stateless | None = None) -> int:
        return 2 * log2_ceil(world)
