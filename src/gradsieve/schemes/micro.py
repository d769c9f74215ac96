"""MiCRO (arXiv 2310.00967): exclusive equal partitions and a threshold that keeps the density.

1. Cut the vector into P equal partitions, once.
2. In step t rank r owns partition (t + r) mod P and selects there what is above the threshold.
3. Gather the selected indices of all ranks.
4. All-reduce the values at those indices.
5. Scale the threshold by the error of the count.

Partitions are never adjusted: where gradients are skewed, one rank's row is long and all ranks pay for it
(f in the formula). ExDyna is this scheme with balanced partitions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from gradsieve.schemes.exclusive import Exclusive, absorb, gather_selected, sum_values
from gradsieve.schemes.shares import quota
from gradsieve.schemes.threshold import Partitioned, no_curve
from gradsieve.types import Ctx, Outcome, Program, Vector

# Capacity of a row over what the heaviest partition had lately. Every rank's row is as long, so that capacity
# costs much here; what does not fit stays in the residual for one step.
_SLACK = 1.03


@dataclass(frozen=True, kw_only=True)
class State(Partitioned):
    # Share of the count that each partition holds; rows are as long as the heaviest one needs.
    load: Tensor


@dataclass(frozen=True, kw_only=True)
class Micro(Exclusive[State]):
    def begin(self, n: int, world: int, previous: State | None = None) -> State:
        threshold = previous.threshold if previous else 0.0
        load = torch.full((world,), 1.0 / world, dtype=torch.float64, device="cpu")
        return State(n=n, threshold=threshold, share=float(self.k(n)), curve=no_curve(), load=load)

    def step(self, acc: Tensor | Vector, state: State, ctx: Ctx) -> Program[Outcome[State]]:
        n, world = state.n, ctx.world
        # 1.
        cuts = np.arange(world + 1) * n // world
        # 2. and 3.
        quotas = quota(state.load + 0.1 / world, state.share, ctx.step).numpy()
        capacity = min(n, 1 + int(_SLACK * state.share * float(state.load.numpy().max())))
        gathered = yield from gather_selected(acc, cuts, quotas, capacity, state.threshold, ctx)
        # 4.
        update, spent = yield from sum_values(acc, gathered, self.values, ctx)
        # 5. The threshold is scaled in `next_states`, when all buckets of the model are known.
        new = absorb(state, gathered)
        if new.demand:
            load = torch.from_numpy(gathered.demand / new.demand)
            new = replace(new, load=(state.load + load) / 2)
        return Outcome(update, spent, new)
