"""ExDyna (arXiv 2402.13781): exclusive partitions of fine-grained blocks, balanced while training runs.

1. Divide the vector into blocks; a partition is a contiguous run of blocks.
2. In step t rank r owns partition (t + r) mod P and selects there what is above the threshold.
3. Gather the selected indices of all ranks, counts included, in one collective.
4. All-reduce the values at those indices.
5. Adjust the partitions: every rank knows all selected indices now, so the cuts that would have given all
   partitions the same work are the quantiles of these indices. Move part of the way there.
6. Scale the threshold by the error of the count.

The published rules (neighbours compared two by two, fixed factors) are in `exdyna_paper.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradsieve.comm.ops import AllReduce
from gradsieve.errors import ConfigError
from gradsieve.schemes.exclusive import (
    SLACK,
    Exclusive,
    Gathered,
    Partitioned,
    absorb,
    gather_selected,
)
from gradsieve.schemes.quota import quota
from gradsieve.schemes.speeds import check_speeds, shares_of_work
from gradsieve.types import Ctx, Outcome, Program, Sparse

_MOVE = 0.2
"""How far the cuts move toward this step's quantiles. These are noisy where a rank sends few elements."""

_FINER = 16
"""Pieces a rank in which the load is known where partitions are of unequal size."""


@dataclass(frozen=True, kw_only=True)
class State(Partitioned):
    cuts: Tensor
    """Positions that divide the load evenly, P + 1 of them (more with unequal speeds, whose partitions lie
    between). Not rounded to blocks: that would swallow moves of less than half a block, and could stall."""
    age: int = 0
    """Steps since the cuts were laid. The first moves are the largest: the mean of all quantiles so far."""


@dataclass(frozen=True, kw_only=True)
class ExDyna(Exclusive[State]):
    blocks_per_partition: int = 64
    """Finer blocks balance better; coarser ones keep a partition's edges in place longer."""
    balance: bool = True
    """False, for ablation: equal partitions for ever; what does not fit into a rank's row waits."""
    speeds: tuple[float, ...] | None = None
    """How fast each rank selects, if not all alike: partitions are sized in proportion, and rows are as long
    as the fastest rank needs."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_speeds(self.speeds)
        if self.blocks_per_partition < 1:
            raise ConfigError(f"blocks_per_partition must be at least 1, not {self.blocks_per_partition}")

    def begin(self, n: int, world: int, previous: State | None = None) -> State:
        threshold = previous.threshold if previous else 0.0
        pieces = world if self.speeds is None else world * _FINER
        cuts = torch.arange(pieces + 1, dtype=torch.float64) * n / pieces
        return State(n=n, threshold=threshold, share=float(self.k(n)), cuts=cuts)

    def step(self, acc: Tensor, state: State, ctx: Ctx) -> Program[Outcome[State]]:
        n, world = state.n, ctx.world
        parts = shares_of_work(self.speeds, world).roll(ctx.step % world)  # in partition order
        # 1.
        block = max(1, n // (world * self.blocks_per_partition))
        cuts = ((_in_proportion(state.cuts, parts) / block).round() * block).long()
        cuts[-1] = n
        # 2. and 3.
        quotas = quota(parts, state.share, ctx.step)
        capacity = min(n, max(1, math.ceil(SLACK * state.share * float(parts.max()))))
        gathered = yield from gather_selected(acc, cuts, quotas, capacity, state.threshold, ctx)
        # 4.
        mine = acc[gathered.picked]
        total = yield AllReduce(mine.clone())
        # 5. and 6. The threshold is scaled in `settle`, when all buckets of the model are known.
        cuts = _balanced(state, gathered) if self.balance else state.cuts
        new = replace(absorb(state, gathered), cuts=cuts, age=state.age + 1)
        return Outcome(Sparse(gathered.picked, total, n), Sparse(gathered.picked, mine, n), new)


def _in_proportion(cuts: Tensor, parts: Tensor) -> Tensor:
    """From cuts that divide the load evenly, those that divide it in proportion to `parts`."""
    pieces = cuts.numel() - 1
    place = torch.cat([parts.new_zeros(1), parts.cumsum(0)]) * pieces
    lower = place.floor().clamp(max=pieces - 1)
    left = lower.long()
    return cuts[left] + (place - lower) * (cuts[left + 1] - cuts[left])


def _balanced(state: State, gathered: Gathered) -> Tensor:
    """Cuts moved toward the quantiles of the selected indices."""
    pieces = state.cuts.numel() - 1
    if not gathered.picked.numel():
        return state.cuts
    # An index stands for the demand of its partition that did not fit into the row as well.
    weight = (gathered.demand / gathered.sent.clamp(min=1)).double()
    load = weight.repeat_interleave(gathered.sent).cumsum(0)
    goals = torch.arange(1, pieces, device=load.device) / pieces * load[-1]
    quantiles = gathered.picked[torch.searchsorted(load, goals)].cpu()
    cuts = state.cuts.clone()
    move = max(_MOVE, 1 / (state.age + 1))
    cuts[1:-1] += move * (quantiles - cuts[1:-1])
    return cuts
