"""Ok-Topk (PPoPP 2022): every rank adds up one region of the vector, the k largest sums go to all ranks.

1. Local threshold: the exact k-th largest |acc| in every `local_period`-th step, followed in between.
2. Select what reaches it, at most the k largest. What is left out is not spent.
3. In every `region_period`-th step set the regions again: the mean over ranks of the quantiles of the
   selected indices. In between they follow the loads of their owners, which all ranks know.
4. Split and reduce: each rank sends to each region's owner what it selected there; the owner adds up.
5. Global selection: in every `global_period`-th step all sums are gathered and the k largest of them taken;
   in between each owner offers what reaches the global threshold, and if these are more than k, its share
   of k. Uneven lists are balanced before they are gathered (`oktopk_parts.py`).
6. A rank has spent what it selected and finds in the update.

A threshold that fewer than k/2 elements reach has been lost and is evaluated in that very step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradsieve.kernels import above, largest
from gradsieve.schemes.oktopk_parts import (
    Chosen,
    Regional,
    State,
    Sums,
    among,
    announce,
    balancing_pays,
    evened,
    gather_sums,
    make_regions,
    split_and_reduce,
    thinned,
)
from gradsieve.schemes.shares import quota
from gradsieve.types import Ctx, Outcome, Program, Sparse

# Elements over k that shall reach a threshold. More than k never travel, so that a little too many cost
# nothing, and too few would leave capacity unused.
_AIM = 1.125
# Share of the way to the aim that is gone at once. What a step leaves behind is there in the next, so that a
# threshold that goes all the way swings to and fro.
_GAIN = 0.5
# Imbalance from which on regions follow the loads.
_LOPSIDED = 1.1


@dataclass(frozen=True, kw_only=True)
class OkTopk(Regional):
    def step(self, acc: Tensor, state: State, ctx: Ctx) -> Program[Outcome[State]]:
        n, k = state.n, self.k(state.n)
        # 1. and 2.
        selected, local = _select(acc, state.local_threshold if ctx.step % self.local_period else 0.0, k)
        # 3.
        cuts = state.cuts
        if int(cuts[-1]) != n or ctx.step % self.region_period == 0:
            cuts = yield from make_regions(_quantiles(selected, n, ctx.world), n)
        # 4.
        selected = thinned(acc, selected, cuts, k)
        sums = yield from split_and_reduce(acc, selected, cuts, k, ctx)
        # 5.
        known = state.global_threshold if ctx.step % self.global_period else 0.0
        chosen = yield from _select_globally(sums, known, k, cuts, ctx)
        # 6.
        mine = selected[among(selected, chosen.indices)]
        imbalance = int(chosen.loads.max()) * ctx.world / max(int(chosen.loads.sum()), 1)
        new = replace(
            state,
            cuts=evened(cuts, chosen.loads) if imbalance > _LOPSIDED else cuts,
            global_threshold=chosen.threshold,
            local_threshold=local,
            gathered=chosen.gathered,
            exact=int(chosen.gathered > k),
            imbalance=imbalance,
        )
        update = Sparse(chosen.indices, chosen.values, n)
        return Outcome(update, Sparse(mine, acc[mine], n), new)


def _select(acc: Tensor, threshold: float, k: int) -> tuple[Tensor, float]:
    """Returns at most k indices of this rank, and the threshold for the next step."""
    if threshold:
        reached = above(acc, threshold)
        if 2 * reached.numel() >= k:
            selected = reached if reached.numel() <= k else reached[largest(acc[reached], k)]
            return selected, _follow(threshold, reached.numel(), acc[selected].abs(), k)
    selected = largest(acc, k)
    return selected, _exact(acc[selected].abs(), k)


def _quantiles(selected: Tensor, n: int, world: int) -> Tensor:
    """Returns P - 1 cuts with as many selected indices between any two as between any other two, give or take
    one; even ones, if nothing is selected."""
    part = torch.arange(1, world, dtype=torch.long, device=selected.device)
    count = selected.numel()
    return selected[part * count // world] if count else part * n // world


def _select_globally(sums: Sums, threshold: float, k: int, cuts: Tensor, ctx: Ctx) -> Program[Chosen]:
    """Returns about k of the sums of all regions; without a threshold exactly the k largest.

    Sums of zero are among those gathered then: where ranks cancel each other out, all ranks have to know it.
    """
    every = torch.arange(sums.values.numel(), dtype=torch.long, device=sums.values.device)
    offered = above(sums.values, threshold) if threshold else every
    counts, loads = yield from announce(sums, offered, cuts, k * ctx.world, ctx)
    reached = int(counts.sum())
    if threshold and 2 * reached < k:
        return (yield from _select_globally(sums, 0.0, k, cuts, ctx))
    if threshold and reached > k:
        counts = quota(counts, k, ctx.step)
        offered = offered[largest(sums.values[offered], int(counts[ctx.rank]))]
    n, balanced = int(cuts[-1]), balancing_pays(counts)
    indices, values = yield from gather_sums(sums, offered, counts, n, balanced, ctx)
    if threshold:
        return Chosen(indices, values, len(indices), _follow(threshold, reached, values.abs(), k), loads)
    best = torch.topk(values.abs(), min(k, reached), sorted=False).indices.sort().values
    return Chosen(indices[best], values[best], len(indices), _exact(values[best].abs(), k), loads)


def _exact(kept: Tensor, k: int) -> float:
    """Returns the threshold to go on with after a selection of the k largest."""
    return _follow(float(kept.min()), kept.numel(), kept, k) if kept.numel() else 0.0


def _follow(threshold: float, reached: int, kept: Tensor, k: int) -> float:
    """Returns the threshold that `_AIM` k elements will reach, or 0 if it cannot be known.

    Two points of the tail are known: `reached` magnitudes are from `threshold` up, half of those kept (the
    largest) from their median up. On a logarithmic scale the aim lies on the line through both.
    """
    if not threshold > 0.0 or not kept.numel():
        return 0.0
    steep = float(kept.median()) / threshold
    way = math.log(reached / (_AIM * k)) / math.log(2 * reached / kept.numel())
    found = threshold * steep ** (_GAIN * way)
    return found if torch.finfo(kept.dtype).tiny <= found < math.inf else 0.0
