"""ExDyna (arXiv 2402.13781): exclusive partitions of fine-grained blocks, balanced while training runs.

1. Divide the vector into blocks; a partition is a contiguous run of blocks.
2. In step t rank r owns partition (t + r) mod P and selects there what is above the threshold. There are
   fewer partitions, and owners, than ranks where rows would be of few elements (`shares.py`).
3. Gather the selected indices of all ranks, counts included, in one collective.
4. All-reduce the values at those indices.
5. Adjust the partitions: every rank knows all selected indices now, so the cuts that would have given all
   partitions the same work are the quantiles of these indices. Move part of the way there.
6. Scale the threshold by the error of the count.

The published rules (neighbours compared two by two, fixed factors) are in `papers/exdyna.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradsieve.errors import ConfigError
from gradsieve.schemes.exclusive import Exclusive, Gathered, absorb, gather_selected, sum_values
from gradsieve.schemes.shares import check_speeds, partitions, quota, shares_of_work
from gradsieve.schemes.threshold import Partitioned, no_curve
from gradsieve.types import Ctx, Outcome, Program, Vector

Edges: TypeAlias = NDArray[np.float64]

# What chose these, where something did: docs/adr/0004-threshold-control.md, "Rows that are cut".
# How far the cuts move toward this step's quantiles. These are noisy where a rank sends few elements. No
# measurement chose this value.
_CUT_GAIN = 0.2
# In which the load is known where partitions are of unequal size.
_PIECES_A_RANK = 16
# Share of the rows that may be too short for what is above the threshold; the rest stays in the residual.
# Without it 36 to 38 % were (CNN, 16 ranks); with it 14 to 15 %, for 2 % more bytes.
_OVERFLOWING = 0.15
# How much longer rows become, as a logarithm, for rows that overflow in excess of that share.
_BUFFER_GAIN = 0.05
# Steps in which cuts find their places: until then moving the cuts has to fix what overflows. Longer rows
# would send up to 3.3 words an element in these.
_FIRST_CUTS = 32
# Rows over what is expected in them. Longer ones would cost more than they carry.
_SHORTEST, _LONGEST = 1.05, 2.0

# Every so many times P steps all partitions are equal, whatever the speeds: every rank then owns everything
# once.
_EVEN_TURNS = 8


@dataclass(frozen=True, kw_only=True)
class State(Partitioned):
    # Positions that divide the load evenly, P + 1 of them (more with unequal speeds, whose partitions lie
    # between). Not rounded to blocks: that would swallow moves of less than half a block, and could stall.
    cuts: Tensor
    # Steps since the cuts were set. The first moves are the largest: the mean of all quantiles so far.
    age: int = 0
    # Of a row, over what is expected in it.
    buffer: float


@dataclass(frozen=True, kw_only=True)
class ExDyna(Exclusive[State]):
    # Finer blocks balance better; coarser ones keep a partition's edges in place longer.
    blocks_per_partition: int = 64
    # False, for ablation: equal partitions for ever; what does not fit stays in the residual.
    balance: bool = True
    # How fast each rank selects, if not all alike: partitions are sized in proportion, and rows are as long
    # as the fastest rank needs.
    speeds: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_speeds(self.speeds)
        if self.blocks_per_partition < 1:
            raise ConfigError(f"blocks_per_partition must be at least 1, not {self.blocks_per_partition}")

    def begin(self, n: int, world: int, previous: State | None = None) -> State:
        threshold = previous.threshold if previous else 0.0
        pieces = partitions(self.k(n), world) if self.speeds is None else world * _PIECES_A_RANK
        cuts = torch.arange(pieces + 1, dtype=torch.float64, device="cpu") * n / pieces
        share = float(self.k(n))
        # Before anything was seen: an eighth, and a standard deviation of a count that is random.
        buffer = previous.buffer if previous else 1.125 + 1 / math.sqrt(max(1.0, share / min(world, pieces)))
        return State(n=n, threshold=threshold, share=share, curve=no_curve(), buffer=buffer, cuts=cuts)

    def owners(self, world: int, state: State) -> int:
        return state.cuts.numel() - 1 if self.speeds is None else world

    def step(self, acc: Tensor | Vector, state: State, ctx: Ctx) -> Program[Outcome[State]]:
        n, world = state.n, ctx.world
        # Where a slow rank's parts are small, they would never come to lie over some elements.
        even = ctx.step // world % _EVEN_TURNS == _EVEN_TURNS - 1
        count = self.owners(world, state)
        parts = shares_of_work(None if even else self.speeds, count).roll(ctx.step % world)  # by partition
        # 1.
        block = max(1, n // (count * self.blocks_per_partition))
        cuts = (np.round(_in_proportion(state.cuts.numpy(), parts.numpy()) / block) * block).astype(np.int64)
        cuts[-1] = n
        # 2. and 3.
        quotas = quota(parts, state.share, ctx.step).numpy()
        capacity = min(n, math.ceil(state.buffer * state.share * float(parts.numpy().max())) or 1)
        gathered = yield from gather_selected(acc, cuts, quotas, capacity, state.threshold, ctx)
        # 4.
        update, spent = yield from sum_values(acc, gathered, self.values, ctx)
        # 5. and 6. The threshold is scaled in `next_states`, when all buckets of the model are known.
        new = absorb(state, gathered)
        if self.balance:
            new = replace(new, cuts=_balanced(state, gathered))
        return Outcome(update, spent, replace(new, age=state.age + 1, buffer=_buffer(state, new.cut)))


def _in_proportion(cuts: Edges, parts: Edges) -> Edges:
    """Turns cuts that divide the load evenly into those that divide it in proportion to `parts`."""
    place = np.concatenate([[0.0], parts.cumsum()]) * (cuts.size - 1)
    moved: Edges = np.interp(place, np.arange(cuts.size), cuts)
    return moved


def _buffer(state: State, cut: float) -> float:
    """Lengthens rows a little where more of them were cut than may be, and else shortens them a little: they
    become as long as demands scatter, whatever makes them scatter."""
    if not state.threshold or state.age < _FIRST_CUTS:  # an exact selection has the length that is expected
        return state.buffer
    return min(max(state.buffer * math.exp(_BUFFER_GAIN * (cut - _OVERFLOWING)), _SHORTEST), _LONGEST)


def _balanced(state: State, gathered: Gathered) -> Tensor:
    """Moves the cuts toward the quantiles of the selected indices."""
    if not gathered.picked.size:
        return state.cuts
    pieces = state.cuts.numel() - 1
    # An index stands for the demand of its partition that did not fit into the row as well.
    weight = gathered.demand / gathered.sent.clip(min=1)
    load = np.repeat(weight, gathered.sent).cumsum()
    goals = np.arange(1, pieces) / pieces * load[-1]
    quantiles = gathered.picked[np.searchsorted(load, goals)]
    cuts = state.cuts.numpy().copy()
    cuts[1:-1] += max(_CUT_GAIN, 1 / (state.age + 1)) * (quantiles - cuts[1:-1])
    return torch.from_numpy(cuts)
