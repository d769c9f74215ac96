"""Top-k over the union: every rank's k largest elements are chosen for all ranks.

1. Select the k largest |acc| of this rank.
2. All-gather their indices.
3. All-reduce the values at the union of all indices, also those that a rank did not select itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from gradsieve.comm.ops import AllGather, Op
from gradsieve.kernels import largest
from gradsieve.schemes.agreed import Agreed, asked_for_sum
from gradsieve.schemes.base import Seen, blank, log2_ceil
from gradsieve.schemes.gathering import reduce_union
from gradsieve.types import Ctx, Outcome, Program


@dataclass(frozen=True, kw_only=True)
class TopKUnion(Agreed[Seen]):
    def begin(self, n: int, world: int, previous: Seen | None = None) -> Seen:
        return Seen()

    def step(self, acc: Tensor, state: Seen, ctx: Ctx) -> Program[Outcome[Seen]]:
        n = acc.numel()
        # 1.
        chosen = largest(acc, self.k(n))
        # 2. and 3. Everybody knows how many they are, so that counts need no gather of their own.
        update, spent, seen = yield from reduce_union(acc, chosen, self.values, ctx, length=self.k(n))
        return Outcome(update, spent, seen)

    def report(self, state: Seen) -> Mapping[str, float]:
        return {"imbalance": state.imbalance}

    def asks(self, n: int, world: int) -> Sequence[Op]:
        union = min(n, self.k(n) * world)
        return [AllGather(blank(self.k(n))), *asked_for_sum(union, self.values, world)]

    def expected_words(self, n: int, world: int, state: Seen | None = None) -> float:
        """At the union seen; without one, as if no two ranks chose the same element."""
        union = state.union if state else min(n, self.k(n) * world)
        return self.k(n) * (world - 1) + 2.0 * union * (world - 1) / world

    def expected_rounds(self, n: int, world: int, state: Seen | None = None) -> int:
        """As published, with a gather of counts; ours are 3 log P."""
        return 4 * log2_ceil(world)
