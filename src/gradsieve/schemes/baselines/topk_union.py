"""Top-k over the union: every rank's k largest elements are chosen for all ranks.

1. Select the k largest |acc| of this rank.
2. All-gather their indices.
3. All-reduce the values at the union of all indices, also those that a rank did not select itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from gradsieve.kernels import largest
from gradsieve.schemes.agreed import Agreed
from gradsieve.schemes.base import Seen
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
