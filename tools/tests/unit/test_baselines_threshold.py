"""Baselines that estimate a threshold: by hand, where their model fits, and where it does not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gradsieve.comm import lockstep
from gradsieve.comm.ops import Meter
from gradsieve.kernels import largest
from gradsieve.schemes.base import Scheme
from gradsieve.types import Ctx, Outcome
from gradsieve_tools.baselines import dgc, gaussiank, sidco
from gradsieve_tools.baselines.hard_threshold import HardThreshold

N, K = 100_000, 1_000


def _uniform(seed: int) -> Tensor:
    return 1 - torch.rand(N, generator=torch.Generator().manual_seed(seed))  # never 0


def _normal() -> Tensor:
    return torch.randn(N, generator=torch.Generator().manual_seed(1))


def _gamma() -> Tensor:
    return torch._standard_gamma(torch.full((N,), 0.5), generator=torch.Generator().manual_seed(1))


DATA: dict[str, Callable[[], Tensor]] = {
    "normal": _normal,
    "exponential": lambda: -_uniform(2).log() * _normal().sign(),
    "gamma": lambda: _gamma() * _normal().sign(),
    "pareto": lambda: 4 * (_uniform(3) ** -0.25 - 1) * _normal().sign(),
    "skewed": lambda: _normal() * torch.exp(-8 * torch.linspace(0, 1, N)),
}


def run(
    scheme: Scheme[Any], accs: list[Tensor], meters: list[Meter] | None = None, step: int = 0
) -> list[Outcome[Any]]:
    world, n = len(accs), accs[0].numel()
    programs = [
        scheme.exchange(acc, scheme.begin(n, world), Ctx(r, world, step)) for r, acc in enumerate(accs)
    ]
    return lockstep.run(programs, meters)


# What all of them do


# Hard threshold


# Gaussian-k


@pytest.mark.parametrize(("k", "quantile"), [(10, 0.6744898), (2, 1.6448536), (1, 1.9599640)])
def test_gaussiank_takes_the_two_sided_quantile_around_the_mean(k: int, quantile: float) -> None:
    acc = torch.tensor([-1.0, 1.0] * 10)
    assert gaussiank.estimate(acc, k) == pytest.approx(quantile)
    assert gaussiank.estimate(3 * acc + 0.5, k) == pytest.approx(0.5 + 3 * quantile)
    assert gaussiank.estimate(3 * acc - 0.5, k) == pytest.approx(0.5 + 3 * quantile)


# SIDCo


def test_sidco_by_hand_in_one_stage_and_in_two() -> None:
    acc = torch.arange(1.0, 11.0) * torch.tensor([1.0, -1.0] * 5)
    assert sidco.select(acc, 5, 1, "exponential").tolist() == [3, 4, 5, 6, 7, 8, 9]  # 5.5 ln 2 = 3.81
    assert sidco.select(acc, 1, 1, "exponential").tolist() == []  # 5.5 ln 10 = 12.7
    # A quarter: 5.5 ln 4 = 7.62; then 0.1/0.25 of the excesses 0, 1, 2: 8 + ln 2.5 = 8.92.
    assert sidco.select(acc, 1, 2, "exponential").tolist() == [8, 9]
    # Half is more than the first of several stages keeps: no stage after it could be right.
    assert sidco.select(acc, 5, 3, "exponential").tolist() == [3, 4, 5, 6, 7, 8, 9]


@pytest.mark.parametrize("fit", sidco.FITS)
def test_a_stage_of_sidco_is_right_where_its_distribution_fits_and_off_where_it_does_not(fit: str) -> None:
    counts = {name: sidco.select(draw(), K, 1, fit).numel() / K for name, draw in DATA.items()}
    assert counts[fit] == pytest.approx(1, abs=0.1)
    assert counts["exponential"] == pytest.approx(1, abs=0.1), "gamma and Pareto contain it"
    assert abs(math.log(counts["normal"])) > math.log(1.5)
    assert counts["skewed"] > 1.5


# DGC


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("step", [0, 1, 1000])
@pytest.mark.parametrize("k", [1, 100, K, N // 3])
def test_dgc_selects_about_k_of_anything(data: str, step: int, k: int) -> None:
    acc = DATA[data]()
    mine = dgc.select(acc, k, step)
    assert 0.8 * k <= mine.numel() <= 1.3 * k
    assert torch.equal(mine, largest(acc, mine.numel())), "not the largest ones"


def test_hard_threshold_reduces_the_union_of_what_any_rank_has_above_the_constant() -> None:
    scheme = HardThreshold(density=0.25)
    first = torch.tensor([0.5, 0.25, 0, -1, 0, 0, 0, 0])
    second = torch.tensor([0.125, 0.125, 0, 0, 0, 0, 0, 8])
    assert scheme.threshold(8) == 0.5 / math.sqrt(2)
    outcomes = run(scheme, [first, second])
    for outcome, acc in zip(outcomes, [first, second], strict=True):
        assert outcome.update.indices.tolist() == outcome.spent.indices.tolist() == [0, 3, 7]
        assert outcome.update.values.tolist() == [0.625, -1, 8]
        assert torch.equal(outcome.spent.values, acc[[0, 3, 7]])
        assert (outcome.state.longest, outcome.state.imbalance, outcome.state.union) == (2, 2 / 1.5, 3)
