"""Ok-Topk (PPoPP 2022): every rank adds up one region of the vector, the k largest sums go to everybody.

1. Local threshold: the exact k-th largest |acc| in every `local_period`-th step, followed in between.
2. Select what reaches it, at most the k largest. What is left out is not spent.
3. In every `region_period`-th step lay the regions anew: the mean over ranks of the quantiles of the
   selected indices. In between they follow the loads of their owners, which everybody knows.
4. Split and reduce: each rank sends to each region's owner what it selected there; the owner adds up.
5. Global selection: in every `global_period`-th step all sums are gathered and the k largest of them taken;
   in between each owner offers what reaches the global threshold, and if these are more than k, its share
   of k. Uneven lists are balanced before they are gathered (`oktopk_balance.py`).
6. A rank has spent what it selected and finds in the update.

A threshold that fewer than k/2 elements reach has been lost and is evaluated in that very step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from gradsieve.comm import bruck
from gradsieve.comm.ops import AllGather, AllReduce, AllToAll
from gradsieve.errors import ConfigError
from gradsieve.kernels import above, largest, sum_by_index
from gradsieve.schemes.base import Scheme, log2_ceil
from gradsieve.schemes.oktopk_balance import evened, gather_lists, thinned
from gradsieve.schemes.quota import quota
from gradsieve.types import Ctx, Outcome, Program, Sparse, private
from gradsieve.wire.check import counts_within, lists_increasing, strictly_increasing
from gradsieve.wire.frame import from_pairs, index_dtype, to_pairs

_AIM = 1.125
"""Elements over k that shall reach a threshold. More than k never travel, so that a little too many cost
nothing, and too few would leave room unused."""
_GAIN = 0.5
"""Share of the way to the aim that is gone at once. What a step leaves behind is there in the next, so that
a threshold that goes all the way swings to and fro."""
_LOPSIDED = 1.1
"""Imbalance from which on regions follow the loads."""


@dataclass(frozen=True, kw_only=True)
class State:
    n: int
    cuts: Tensor
    """P + 1 edges of the regions; all 0: not laid yet."""
    global_threshold: float = 0.0
    """For sums, of this vector alone. 0: none known."""
    local_threshold: float = private(0.0)
    """For this rank's own elements. 0: none known."""
    gathered: int = 0
    """Sums gathered in the last step: at most k, or all there were."""
    imbalance: float = 1.0
    """Most elements that came to one owner over the mean."""


class Sums(NamedTuple):
    indices: Tensor
    values: Tensor
    load: int
    """Elements that were added up."""


class Chosen(NamedTuple):
    """The same on every rank."""

    indices: Tensor
    values: Tensor
    gathered: int
    threshold: float
    """For the next step."""
    loads: Tensor
    """Elements that came to each owner."""


@dataclass(frozen=True, kw_only=True)
class OkTopk(Scheme[State]):
    local_period: int = 32
    """Steps between exact local thresholds; the paper's tau', as the next one."""
    global_period: int = 32
    """Steps between exact global thresholds."""
    region_period: int = 64
    """Steps between new regions; the paper's tau."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("local_period", "global_period", "region_period"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1 step, not {getattr(self, name)}")

    def begin(self, n: int, world: int, previous: State | None = None) -> State:
        """Thresholds are one vector's own and are not taken over: the first step evaluates them."""
        return State(n=n, cuts=torch.zeros(world + 1, dtype=torch.long, device="cpu"))

    def step(self, acc: Tensor, state: State, ctx: Ctx) -> Program[Outcome[State]]:
        n, k = state.n, self.k(state.n)
        # 1. and 2.
        selected, local = _select(acc, state.local_threshold if ctx.step % self.local_period else 0.0, k)
        # 3.
        cuts = state.cuts
        if int(cuts[-1]) != n or ctx.step % self.region_period == 0:
            cuts = yield from _lay_regions(selected, n, ctx.world)
        # 4.
        selected = thinned(acc, selected, cuts, k)
        sums = yield from _split_and_reduce(acc, selected, cuts, k, ctx)
        # 5.
        known = state.global_threshold if ctx.step % self.global_period else 0.0
        chosen = yield from _select_globally(sums, known, k, n, ctx)
        # 6.
        mine = selected[_among(selected, chosen.indices)]
        imbalance = int(chosen.loads.max()) * ctx.world / max(int(chosen.loads.sum()), 1)
        new = replace(
            state,
            cuts=evened(cuts, chosen.loads) if imbalance > _LOPSIDED else cuts,
            global_threshold=chosen.threshold,
            local_threshold=local,
            gathered=chosen.gathered,
            imbalance=imbalance,
        )
        update = Sparse(chosen.indices, chosen.values, n)
        return Outcome(update, Sparse(mine, acc[mine], n), new)

    def report(self, state: State) -> Mapping[str, float]:
        exact = float(state.gathered > self.k(state.n))
        return {"threshold": state.global_threshold, "imbalance": state.imbalance, "exact": exact}

    def expected_words(self, n: int, world: int, state: State | None = None) -> float:
        """4k of the published 2k to 6k: k elements to owners, k sums (all on exact steps) to everybody."""
        imbalance, gathered = (state.imbalance, state.gathered) if state else (1.0, self.k(n))
        return 2.0 * (self.k(n) * imbalance + gathered) * (world - 1) / world

    def words_band(self, n: int, world: int, state: State | None = None) -> tuple[float, float]:
        """2k to 6k as published. The upper end is 2k to the owners and 2k twice, to balance and to gather;
        of more than k sums on an exact step."""
        unit = (world - 1) / world
        gathered = max(self.k(n), state.gathered if state else 0)
        return 2.0 * self.k(n) * unit, (2.0 * self.k(n) + 4.0 * gathered) * unit

    def expected_rounds(self, n: int, world: int, state: State | None = None) -> int:
        """As published, with balancing. Ours are P-1 + 3 ceil(log2 P), and P-1 more with balancing."""
        return 2 * world + 2 * log2_ceil(world)


def _select(acc: Tensor, threshold: float, k: int) -> tuple[Tensor, float]:
    """At most k indices of this rank, and the threshold for the next step."""
    if threshold:
        reached = above(acc, threshold)
        if 2 * reached.numel() >= k:
            selected = reached if reached.numel() <= k else reached[largest(acc[reached], k)]
            return selected, _follow(threshold, reached.numel(), acc[selected].abs(), k)
    selected = largest(acc, k)
    return selected, _exact(acc[selected].abs(), k)


def _lay_regions(selected: Tensor, n: int, world: int) -> Program[Tensor]:
    """Edges that give every owner about the same work, the same ones on every rank."""
    total = yield AllReduce(_quantiles(selected, n, world))
    cuts = torch.zeros(world + 1, dtype=torch.long, device="cpu")
    # A mean of sorted lists is sorted; only a peer that lies could make it otherwise.
    cuts[1:-1] = (total // world).clamp(0, n).sort().values
    cuts[-1] = n
    return cuts


def _quantiles(selected: Tensor, n: int, world: int) -> Tensor:
    """P - 1 cuts with as many selected indices between any two as between any other two, give or take one;
    of nothing selected, even ones."""
    part = torch.arange(1, world, dtype=torch.long, device=selected.device)
    count = selected.numel()
    return selected[part * count // world] if count else part * n // world


def _split_and_reduce(acc: Tensor, selected: Tensor, cuts: Tensor, k: int, ctx: Ctx) -> Program[Sums]:
    """What all ranks selected in this rank's region, added up in rank order.

    That nobody is everybody's target at once and a few messages are under way together is the engine's work.
    """
    n, start, stop = acc.numel(), int(cuts[ctx.rank]), int(cuts[ctx.rank + 1])
    what = f"in step {ctx.step}"
    counts = torch.searchsorted(selected, cuts.to(acc.device)).diff()
    sizes = yield from bruck.transpose(counts.to(index_dtype(n)), ctx.rank)
    counts_within(sizes, min(k, stop - start), f"elements {what}")
    rows = to_pairs(selected, acc[selected], n)
    rows = yield AllToAll(rows, tuple(counts.tolist()), tuple(sizes.tolist()))
    indices, values = from_pairs(rows, acc.dtype)
    lists_increasing(indices, sizes, start, stop, f"indices {what}")
    indices, sums = sum_by_index(indices - start, values, stop - start)
    return Sums(indices + start, sums, len(rows))


def _select_globally(sums: Sums, threshold: float, k: int, n: int, ctx: Ctx) -> Program[Chosen]:
    """About k of the sums of all regions. Without a threshold exactly the k largest.

    Sums of zero are among those gathered then: where ranks cancel each other out they all have to be told.
    """
    indices, values, load = sums
    every = torch.arange(values.numel(), dtype=torch.long, device=values.device)
    offered = above(values, threshold) if threshold else every
    most = k * ctx.world
    sizes = yield AllGather(values.new_tensor([offered.numel(), load], dtype=index_dtype(most)))
    counts, loads = sizes.cpu().long().unbind(1)
    counts_within(counts, min(n, most), f"sums in step {ctx.step}")
    counts_within(loads, most, f"elements received in step {ctx.step}")
    reached = int(counts.sum())
    if threshold and 2 * reached < k:
        return (yield from _select_globally(sums, 0.0, k, n, ctx))
    if threshold and reached > k:
        counts = quota(counts, k, ctx.step)
        offered = offered[largest(values[offered], int(counts[ctx.rank]))]
    rows = to_pairs(indices[offered], values[offered], n)
    rows = yield from gather_lists(rows, counts, ctx.rank)
    indices, values = from_pairs(rows, values.dtype)
    strictly_increasing(indices, n, f"indices gathered in step {ctx.step}")
    if threshold:
        return Chosen(indices, values, len(rows), _follow(threshold, reached, values.abs(), k), loads)
    best = torch.topk(values.abs(), min(k, reached), sorted=False).indices.sort().values
    return Chosen(indices[best], values[best], len(rows), _exact(values[best].abs(), k), loads)


def _exact(kept: Tensor, k: int) -> float:
    """The threshold to go on with after a selection of the k largest."""
    return _follow(float(kept.min()), kept.numel(), kept, k) if kept.numel() else 0.0


def _follow(threshold: float, reached: int, kept: Tensor, k: int) -> float:
    """The threshold that `_AIM` k elements will reach, or 0 if there is no telling.

    Two points of the tail are known: `reached` magnitudes are from `threshold` up, half of those kept (the
    largest) from their median up. On a logarithmic scale the aim lies on the line through both.
    """
    if not threshold > 0.0 or not kept.numel():
        return 0.0
    steep = float(kept.median()) / threshold
    way = math.log(reached / (_AIM * k)) / math.log(2 * reached / kept.numel())
    found = threshold * steep ** (_GAIN * way)
    return found if torch.finfo(kept.dtype).tiny <= found < math.inf else 0.0


def _among(sorted_some: Tensor, sorted_all: Tensor) -> Tensor:
    """Which of `sorted_some` are in `sorted_all`."""
    if not sorted_all.numel():
        return torch.zeros_like(sorted_some, dtype=torch.bool)
    place = torch.searchsorted(sorted_all, sorted_some).clamp(max=sorted_all.numel() - 1)
    return sorted_all[place] == sorted_some
