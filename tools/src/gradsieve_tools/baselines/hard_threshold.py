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
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from gradsieve.kernels import above
from gradsieve.schemes.base import Agreed
from gradsieve.schemes.baselines.topk_union import Seen, reduce_union
from gradsieve.types import Ctx, Outcome, Program
from gradsieve_tools.baselines.gathering import gather_counts


@dataclass(frozen=True, kw_only=True)
class HardThreshold(Agreed[Seen]):
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
        n = acc.numel()
        counts = yield from gather_counts(mine, n, n, ctx)
        return (yield from reduce_union(acc, mine, int(counts.max()), self.values, ctx))

    def threshold(self, n: int) -> float:
        return 0.5 / math.sqrt(max(self.k(n), 1))

    def report(self, state: Seen) -> Mapping[str, float]:
        return {"imbalance": state.imbalance}
