"""MiCRO with the rules and constants of the paper and its release, to compare `micro.py` against.

1. P equal partitions of the whole model, once; the first n mod P have one element more.
2. In step t rank r owns partition (t + r) mod P. Select there what reaches the threshold; where nothing does,
   one element, round robin.
3. Gather the counts, then the indices padded to the largest count, then all-reduce the values.
4. Threshold: 1 / (2 sqrt k) at first; then times 1.005 / 1.00125 / 0.995 for a count above 1.1 k, inside
   the band, below k / 1.1.

Kept out are the crashes of the release: one rank, and a dummy index in an empty partition.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradsieve.schemes.papers.exclusive import PublishedThreshold, Tracked, edges_of, exchange_partitions
from gradsieve.schemes.shares import evenly
from gradsieve.types import Ctx, Outcome, Program


@dataclass(frozen=True, kw_only=True)
class MicroPaper(PublishedThreshold[Tracked]):
    def begin(self, n: int, world: int, previous: Tracked | None = None) -> Tracked:
        load = torch.zeros(world, dtype=torch.long, device="cpu")
        return Tracked(n=n, threshold=self.first_threshold(n, previous), load=load)

    def step(self, acc: Tensor, state: Tracked, ctx: Ctx) -> Program[Outcome[Tracked]]:
        # 1.
        cuts = edges_of(evenly(state.n, ctx.world))
        # 2. and 3. (4. is in `next_states`)
        update, spent, load = yield from exchange_partitions(acc, cuts, state.threshold, ctx)
        return Outcome(update, spent, replace(state, load=load, sent=update.count))
