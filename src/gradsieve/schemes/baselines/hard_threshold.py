"""Hard threshold: every rank picks what is above one constant, and nothing controls how much that is.

1. The threshold is 1 / (2 sqrt k), whatever the gradients are.
2. Each rank picks its |acc| at or above it.
3. Gather counts, then indices padded to the largest count; their union is what travels.
4. All-reduce the values at the union; every rank spends its own there.

Density follows the scale of the gradients, from nothing to everything: what threshold control is about.
What stays below the constant for good, on every rank, is never sent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from gradsieve.comm.ops import AllGather, Op
from gradsieve.kernels import above
from gradsieve.schemes.agreed import Agreed, asked_for_sum
from gradsieve.schemes.base import Seen, blank, log2_ceil
from gradsieve.schemes.gathering import reduce_union
from gradsieve.types import Ctx, Outcome, Program


@dataclass(frozen=True, kw_only=True)
class HardThreshold(Agreed[Seen]):
    looks: ClassVar[float] = 1.0

    @property
    def remembers(self) -> bool:
        """Counts grow as residuals fill up, so that one step does not predict the traffic of the next."""
        return True

    def begin(self, n: int, world: int, previous: Seen | None = None) -> Seen:
        return Seen()

    def step(self, acc: Tensor, state: Seen, ctx: Ctx) -> Program[Outcome[Seen]]:
        # 1. and 2.
        mine = above(acc, self.threshold(acc.numel()))
        # 3. and 4.
        update, spent, seen = yield from reduce_union(acc, mine, self.values, ctx)
        return Outcome(update, spent, seen)

    def threshold(self, n: int) -> float:
        return 0.5 / math.sqrt(max(self.k(n), 1))

    def report(self, state: Seen) -> Mapping[str, float]:
        return {"imbalance": state.imbalance}

    def asks(self, n: int, world: int) -> Sequence[Op]:
        union = min(n, self.k(n) * world)
        rows = [AllGather(blank(1)), AllGather(blank(self.k(n)))]
        return [*rows, *asked_for_sum(union, self.values, world)]

    def expected_words(self, n: int, world: int, state: Seen | None = None) -> float:
        """Without a state, as if every rank picked k elements that no other picked."""
        longest, union = (state.longest, state.union) if state else (self.k(n), min(n, self.k(n) * world))
        return (longest + 2.0 * union / world) * (world - 1)

    def expected_rounds(self, n: int, world: int, state: Seen | None = None) -> int:
        return 4 * log2_ceil(world)
