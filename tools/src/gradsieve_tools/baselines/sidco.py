"""SIDCo (arXiv 2101.10761): the threshold is a quantile of a fitted distribution, found in stages.

1. Fit |acc|: exponential, gamma or generalised Pareto, by its moments.
2. Threshold: the quantile for k/n of it; with several stages, for a quarter.
3. Each further stage fits the excess of the survivors over their smallest (exponential, or Pareto again), and
   keeps the same share of them, so that k are left after the last.
4. All-gather counts, then the entries; add up, in rank order, what the ranks sent for each index.
5. Every five steps: one stage more where fewer than 0.8 k were selected on average, one less where more than
   1.2 k were. Each rank counts for itself, and for each unit.

Elements that are zero are no sample of any of these distributions: the fit leaves them out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gradsieve.errors import ConfigError
from gradsieve.types import Ctx, Outcome, Program, private
from gradsieve_tools.baselines.gathering import Gathering, at_least_one, gather_entries, reaching

# Share that the first of several stages keeps.
_FIRST = 0.25
# Share that every stage keeps when there are as many as may be.
_HALF = 0.5
_PERIOD = 5
_FEW, _MANY = 0.8, 1.2


@dataclass(frozen=True, kw_only=True)
class State:
    longest: int = 0
    imbalance: float = 1.0
    # Steps since the number of stages was looked at.
    steps: int = 0
    stages: int = private(1)
    # Selected over wanted, added up over these steps.
    ratios: float = private(0.0)


@dataclass(frozen=True, kw_only=True)
class Sidco(Gathering[State]):
    # The distribution that is fitted to the magnitudes.
    fit: Literal["exponential", "gamma", "pareto"] = "exponential"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fit not in FITS:
            raise ConfigError(f"fit must be one of {', '.join(FITS)}, not {self.fit!r}")

    def begin(self, n: int, world: int, previous: State | None = None) -> State:
        return State()

    def step(self, acc: Tensor, state: State, ctx: Ctx) -> Program[Outcome[State]]:
        k = self.k(acc.numel())
        mine = at_least_one(acc, select(acc, k, state.stages, self.fit))
        # 4.
        update, spent, seen = yield from gather_entries(acc, mine, ctx)
        # 5.
        steps, stages = state.steps + 1, state.stages
        ratios = state.ratios + mine.numel() / max(k, 1)
        if steps == _PERIOD:
            stages = self._adapted(stages, ratios / _PERIOD)
            steps, ratios = 0, 0.0
        new = State(longest=seen.longest, imbalance=seen.imbalance, steps=steps, stages=stages, ratios=ratios)
        return Outcome(update, spent, new)

    def _adapted(self, stages: int, ratio: float) -> int:
        most = math.ceil(math.log(self.density) / math.log(_HALF))
        stages += (ratio < _FEW) - (ratio > _MANY)
        return max(1, min(stages, most))


def select(acc: Tensor, k: int, stages: int, fit: str) -> Tensor:
    """Sorted indices of about k of the largest elements."""
    alive = int(acc.count_nonzero())
    if alive <= k:
        return reaching(acc, 0.0)
    share = k / alive
    if share >= _FIRST:
        stages = 1
    first = share if stages == 1 else _FIRST
    # 1. and 2.
    mine = reaching(acc, FITS[fit](_magnitudes(acc, alive), first))
    # 3.
    later = _pareto if fit == "pareto" else _exponential
    for _ in range(stages - 1):
        if not mine.numel():
            break
        magnitude = acc[mine].abs()
        least = magnitude.min()
        mine = mine[magnitude >= least + later(magnitude - least, (share / first) ** (1 / (stages - 1)))]
    return mine


def _magnitudes(acc: Tensor, alive: int) -> Tensor:
    magnitude = acc.abs()
    return magnitude if alive == acc.numel() else magnitude[magnitude != 0]


def _exponential(x: Tensor, share: float) -> float:
    return -float(x.mean()) * math.log(share)


def _pareto(x: Tensor, share: float) -> float:
    variance, mean = (float(moment) for moment in torch.var_mean(x, correction=0))
    if not variance > 0.0:
        return mean
    ratio = mean * mean / variance
    scale, shape = 0.5 * mean * (ratio + 1.0), 0.5 * (ratio - 1.0)
    if shape == 0.0:
        return -scale * math.log(share)
    return -scale * math.expm1(shape * math.log(share)) / shape


def _gamma(x: Tensor, share: float) -> float:
    """Overwrites x."""
    mean = x.mean()
    spread = float(mean.log() - x.log_().mean())
    if not spread > 0.0:
        return float(mean)
    shape = (3.0 - spread + math.sqrt((spread - 3.0) ** 2 + 24.0 * spread)) / (12.0 * spread)
    return float(mean) / shape * gamma_quantile(shape, share)


FITS = {"exponential": _exponential, "gamma": _gamma, "pareto": _pareto}


def gamma_quantile(shape: float, share: float) -> float:
    """Return what a gamma variable of scale 1 exceeds with probability `share`, by bisection."""

    def exceeded(x: float) -> bool:
        both = torch.tensor([shape, x], dtype=torch.float64, device="cpu")
        return float(torch.special.gammaincc(*both)) > share

    low, high = 0.0, 1.0
    for _ in range(64):
        if not exceeded(high):
            break
        low, high = high, 2.0 * high
    for _ in range(64):
        middle = (low + high) / 2.0
        low, high = (middle, high) if exceeded(middle) else (low, middle)
    return low
