"""Ok-Topk with the rules of the paper and the constants of its release, to compare `oktopk.py` against.

Written from a description of the method; no line of the published (GPL) code was used.

1. Local threshold: the exact k-th largest |acc| in every `local_period`-th step, else the one at hand; while
   too many elements are beyond it, it is raised, a few times at most.
2. Select what is beyond the threshold. If too few or too many were, it is lowered or raised from then on.
3. In every `region_period`-th step set the regions again: the mean over ranks of the indices at places c, 2c
   and so on of those selected, where c is a P-th of their number.
4. Split and reduce: each rank sends to each region's owner what it selected there; the owner adds up.
5. Global selection: in every `global_period`-th step all sums but zeros are gathered and the k largest of
   them taken; in between each owner offers what is beyond the global threshold, which follows its count as
   the local one does. Lists are balanced first where the longest is over four times the mean.
6. A rank has spent what it selected and finds in the update.

Constants are those of the release for VGG; the page has those for LSTM and BERT.

Kept out are crashes (nothing selected where regions are set, fewer sums than k) and the double counting of
two copies of the release. Regions are added up in 64 bits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from gradsieve.comm.ops import AllReduce
from gradsieve.errors import ConfigError
from gradsieve.kernels import above, largest
from gradsieve.schemes.oktopk_parts import (
    Chosen,
    Regional,
    State,
    Sums,
    among,
    announce,
    gather_sums,
    make_regions,
    split_and_reduce,
)
from gradsieve.types import Ctx, Outcome, Program, Sparse


@dataclass(frozen=True, kw_only=True)
class OkTopkPaper(Regional):
    # Steps at first in which everything is sent; the release has 512.
    dense_steps: int = 0
    # Elements over k from which on the local threshold is raised before anything is selected.
    guard: float = 4 / 3
    # By how much at a time.
    guard_factor: float = 1.03
    # How often at most.
    guard_rounds: int = 5
    # Elements over k below which the local threshold falls.
    local_few: float = 2 / 3
    # Elements over k above which it rises.
    local_many: float = 5 / 4
    # By how much it falls.
    local_down: float = 1.012
    # By how much it rises.
    local_up: float = 1.012
    # Sums over k below which the global threshold falls.
    global_few: float = 2 / 3
    # Sums over k above which it rises.
    global_many: float = 4 / 3
    # By how much it falls.
    global_down: float = 1.008
    # By how much it rises.
    global_up: float = 1.008
    # Longest list of sums over the mean from which on lists are balanced.
    lopsided: float = 4.0

    whole_model: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("guard_factor", "local_down", "local_up", "global_down", "global_up"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        if min(self.dense_steps, self.guard_rounds) < 0:
            raise ConfigError("dense_steps and guard_rounds are counts: 0 or more")

    def step(self, acc: Tensor, state: State, ctx: Ctx) -> Program[Outcome[State]]:
        n, k = state.n, self.k(state.n)
        if ctx.step < self.dense_steps:
            total = yield AllReduce(acc.clone())
            return Outcome(Sparse.full(total), Sparse.full(acc), state)
        # 1. and 2.
        selected, threshold = self._select(acc, state.local_threshold, k, ctx.step)
        ratio = selected.numel() / max(k, 1)
        local = threshold * _factor(ratio, self.local_few, self.local_many, self.local_down, self.local_up)
        # 3.
        cuts = state.cuts
        if int(cuts[-1]) != n or ctx.step % self.region_period == 0:
            cuts = yield from make_regions(_every_pth(selected, n, ctx.world), n)
        # 4.
        sums = yield from split_and_reduce(acc, selected, cuts, n, ctx)
        # 5.
        known = state.global_threshold if ctx.step % self.global_period else 0.0
        chosen = yield from self._select_globally(sums, known, k, cuts, ctx)
        # 6.
        mine = selected[among(selected, chosen.indices)]
        new = replace(
            state,
            cuts=cuts,
            global_threshold=chosen.threshold,
            local_threshold=local,
            gathered=chosen.gathered,
            exact=int(not known),
            imbalance=int(chosen.loads.max()) * ctx.world / max(int(chosen.loads.sum()), 1),
        )
        return Outcome(Sparse(chosen.indices, chosen.values, n), Sparse(mine, acc[mine], n), new)

    def _select(self, acc: Tensor, threshold: float, k: int, step: int) -> tuple[Tensor, float]:
        """Returns this rank's indices and the threshold they are beyond."""
        if step % self.local_period == 0 or not threshold:
            threshold = _smallest(acc[largest(acc, k)], k)
            return _beyond(acc, threshold), threshold
        selected = _beyond(acc, threshold)
        for _ in range(self.guard_rounds):
            if selected.numel() <= self.guard * k:
                break
            threshold *= self.guard_factor
            selected = _beyond(acc, threshold)
        return selected, threshold

    def _select_globally(
        self, sums: Sums, threshold: float, k: int, cuts: Tensor, ctx: Ctx
    ) -> Program[Chosen]:
        """Returns the k largest of the sums of all regions; with a threshold, those beyond it."""
        offered = _beyond(sums.values, threshold)
        n = int(cuts[-1])
        counts, loads = yield from announce(sums, offered, cuts, n * ctx.world, ctx)
        reached = int(counts.sum())
        balanced = int(counts.max()) * ctx.world > self.lopsided * reached
        indices, values = yield from gather_sums(sums, offered, counts, n, balanced, ctx)
        if threshold:
            band = self.global_few, self.global_many, self.global_down, self.global_up
            return Chosen(indices, values, reached, threshold * _factor(reached / max(k, 1), *band), loads)
        best = torch.topk(values.abs(), min(k, reached), sorted=False).indices.sort().values
        threshold = _smallest(values[best], k)
        return Chosen(indices[best], values[best], reached, threshold, loads)


def _beyond(x: Tensor, threshold: float) -> Tensor:
    """Returns sorted indices with |x| > threshold, where `above` has >=."""
    at = torch.tensor(threshold, dtype=x.dtype, device="cpu")
    return above(x, float(at.nextafter(at.new_tensor(torch.inf))))


def _smallest(kept: Tensor, k: int) -> float:
    """Returns the exact threshold of the k largest, or 0 if there are fewer."""
    return float(kept.abs().min()) if 0 < k == kept.numel() else 0.0


def _factor(ratio: float, few: float, many: float, down: float, up: float) -> float:
    """Returns what scales the threshold for the next step, given the count over k in this one."""
    if ratio < few:
        return 1 / down
    return up if ratio > many else 1.0


def _every_pth(selected: Tensor, n: int, world: int) -> Tensor:
    """Returns the published cuts; even ones, if nothing is selected."""
    part = torch.arange(1, world, dtype=torch.long, device=selected.device)
    count = selected.numel()
    return selected[part * (count // world)] if count else part * n // world
