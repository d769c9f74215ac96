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
from gradsieve.errors import ConfigError
from gradsieve.kernels import above, largest
from gradsieve.schemes import make
from gradsieve.schemes.base import Scheme, log2_ceil
from gradsieve.testing.ranks import VirtualRanks
from gradsieve.types import Ctx, Outcome
from gradsieve_tools import formulas
from gradsieve_tools.baselines import dgc, gaussiank, sidco
from gradsieve_tools.baselines.dgc import Dgc
from gradsieve_tools.baselines.gaussiank import GaussianK
from gradsieve_tools.baselines.hard_threshold import HardThreshold
from gradsieve_tools.baselines.sidco import Sidco

N, K = 100_000, 1_000
ESTIMATING = ["gaussiank", "sidco", "dgc"]


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


def spent_by(scheme: Scheme[Any], acc: Tensor) -> list[int]:
    indices = run(scheme, [acc])[0].spent.indices
    assert indices is not None
    return list(indices.tolist())


# What all of them do


@pytest.mark.parametrize("name", [*ESTIMATING, "hard-threshold"])
def test_where_nobody_selects_anything_the_update_is_empty(name: str) -> None:
    for outcome in run(make(name, 0.1), [torch.zeros(50)] * 3):
        assert outcome.update.count == outcome.spent.count == 0
        assert make(name).report(outcome.state) == {"imbalance": 1.0}


@pytest.mark.parametrize("name", ESTIMATING)
def test_entries_are_added_up_also_beside_a_rank_that_has_none(name: str) -> None:
    first, second = torch.zeros(40), torch.zeros(40)
    first[3], first[9], second[9] = 4.0, 8.0, -2.0
    outcomes = run(make(name, 0.05), [first, torch.zeros(40), second])
    assert [outcome.spent.count for outcome in outcomes] == [2, 0, 1]
    for outcome in outcomes:
        assert outcome.update.indices.tolist() == [3, 9]
        assert outcome.update.values.tolist() == [4.0, 6.0]


@pytest.mark.parametrize("name", ESTIMATING)
def test_one_element_is_sent_even_where_every_estimate_underflows(name: str) -> None:
    acc = torch.zeros(2_000)
    acc[[7, 70]] = torch.tensor([1e-42, -1e-41])
    assert spent_by(make(name, 0.001), acc) == [70]


@pytest.mark.parametrize("name", ESTIMATING)
@pytest.mark.parametrize("world", [2, 3, 8])
def test_words_and_rounds_are_those_of_the_formula(name: str, world: int) -> None:
    """And one word of each rank for its count."""
    scheme, meters = make(name, 0.01), [Meter(rank, world) for rank in range(world)]
    source = torch.Generator().manual_seed(world)
    outcomes = run(scheme, [torch.randn(5_000, generator=source) for _ in range(world)], meters)
    longest = max(outcome.spent.count for outcome in outcomes)
    for outcome, meter in zip(outcomes, meters, strict=True):
        words = formulas.words(scheme, 5_000, world, outcome.state)
        assert words == 2 * longest * (world - 1)
        assert meter.moved / 4 == words + world - 1
        assert meter.rounds == formulas.rounds(scheme, 5_000, world, outcome.state) == 2 * log2_ceil(world)
        mean = sum(outcome.spent.count for outcome in outcomes) / world
        assert scheme.report(outcome.state)["imbalance"] == pytest.approx(longest / mean)
    assert formulas.words(scheme, 5_000, world) == 2 * 50 * (world - 1)


# Hard threshold


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


@pytest.mark.parametrize("world", [2, 3, 8])
def test_words_and_rounds_of_hard_threshold_are_those_of_its_formula(world: int) -> None:
    scheme, meters = HardThreshold(density=0.01), [Meter(rank, world) for rank in range(world)]
    source = torch.Generator().manual_seed(world)
    outcomes = run(scheme, [0.03 * torch.randn(5_000, generator=source) for _ in range(world)], meters)
    seen = outcomes[0].state
    assert 0 < seen.longest < seen.union < 5_000
    for meter in meters:
        words = formulas.words(scheme, 5_000, world, seen)
        assert words == pytest.approx((seen.longest + 2 * seen.union / world) * (world - 1))
        assert meter.moved / 4 == pytest.approx(words + world - 1)
        assert meter.rounds == formulas.rounds(scheme, 5_000, world, seen) == 4 * log2_ceil(world)
    assert formulas.words(scheme, 5_000, world) == pytest.approx(3 * 50 * (world - 1))


def test_density_of_hard_threshold_follows_the_scale_from_nothing_to_everything() -> None:
    counts = [len(spent_by(HardThreshold(density=0.01), scale * DATA["normal"]())) for scale in (1e-3, 1e3)]
    assert counts[0] == 0
    assert counts[1] > 0.99 * N


def test_what_stays_below_the_hard_threshold_is_never_sent() -> None:
    """By its nature it does not drain: other schemes send this element in the first silent step."""
    left = {}
    for name in ("hard-threshold", "gaussiank"):
        fleet = VirtualRanks(make(name, 0.01), [100], 2)
        for _ in fleet.advance(lambda step, rank, unit: torch.full((100,), 0.4 * (step == 0)), 100):
            pass
        left[name] = int(fleet.residuals[0][0].count_nonzero())
    assert left == {"hard-threshold": 100, "gaussiank": 0}


# Gaussian-k


@pytest.mark.parametrize(("k", "quantile"), [(10, 0.6744898), (2, 1.6448536), (1, 1.9599640)])
def test_gaussiank_takes_the_two_sided_quantile_around_the_mean(k: int, quantile: float) -> None:
    acc = torch.tensor([-1.0, 1.0] * 10)
    assert gaussiank.estimate(acc, k) == pytest.approx(quantile)
    assert gaussiank.estimate(3 * acc + 0.5, k) == pytest.approx(0.5 + 3 * quantile)
    assert gaussiank.estimate(3 * acc - 0.5, k) == pytest.approx(0.5 + 3 * quantile)


def test_the_estimate_of_gaussiank_is_right_where_data_are_normal_and_nowhere_else() -> None:
    counts = {name: above(x := draw(), gaussiank.estimate(x, K)).numel() / K for name, draw in DATA.items()}
    assert counts.pop("normal") == pytest.approx(1, abs=0.1)
    assert min(counts.values()) > 2, counts


@pytest.mark.parametrize("data", DATA)
def test_gaussiank_sends_what_its_last_threshold_says(data: str) -> None:
    """Corrected and selected again step by step; the published code forgets the last selection."""
    acc = DATA[data]()
    threshold, corrections = gaussiank.estimate(acc, K), 0
    while corrections < 20 and not 0.75 * K <= (count := above(acc, threshold).numel()) <= 1.25 * K:
        threshold *= 1.02 if count > K else 1 / 1.02
        corrections += 1
    sent = spent_by(GaussianK(density=0.01), acc)
    assert sent == above(acc, threshold).tolist()
    assert (corrections == 0) == (data == "normal")
    if 0 < corrections < 20:
        assert 0.75 * K <= len(sent) <= 1.25 * K


def test_gaussiank_lowers_a_threshold_that_too_few_reach_twenty_times_at_most() -> None:
    outlier = torch.cat([torch.tensor([100.0]), torch.linspace(0.5, 1, 99)])
    threshold = gaussiank.estimate(outlier, 10)
    assert above(outlier, threshold / 1.02**20).numel() == 1
    assert above(outlier, threshold / 1.02**200).numel() > 1
    assert spent_by(GaussianK(density=0.1), outlier) == [0]


# SIDCo


def test_sidco_by_hand_in_one_stage_and_in_two() -> None:
    acc = torch.arange(1.0, 11.0) * torch.tensor([1.0, -1.0] * 5)
    assert sidco.select(acc, 5, 1, "exponential").tolist() == [3, 4, 5, 6, 7, 8, 9]  # 5.5 ln 2 = 3.81
    assert sidco.select(acc, 1, 1, "exponential").tolist() == []  # 5.5 ln 10 = 12.7
    # A quarter: 5.5 ln 4 = 7.62; then 0.1/0.25 of the excesses 0, 1, 2: 8 + ln 2.5 = 8.92.
    assert sidco.select(acc, 1, 2, "exponential").tolist() == [8, 9]
    # Half is more than the first of several stages keeps: no stage after it could be right.
    assert sidco.select(acc, 5, 3, "exponential").tolist() == [3, 4, 5, 6, 7, 8, 9]


def test_zeros_are_left_out_of_the_fit() -> None:
    acc = torch.arange(1.0, 11.0)
    padded = torch.cat([acc, torch.zeros(990)])
    for fit in sidco.FITS:
        assert sidco.select(padded, 2, 1, fit).tolist() == sidco.select(acc, 2, 1, fit).tolist()
        assert sidco.select(padded, 10, 1, fit).tolist() == list(range(10))


def test_fits_by_hand() -> None:
    exponential, pareto, gamma = (sidco.FITS[fit] for fit in ("exponential", "pareto", "gamma"))
    assert exponential(torch.tensor([1.0, 3.0]), 0.1) == pytest.approx(2 * math.log(10))
    assert pareto(torch.tensor([0.5, 1.5]), 0.25) == pytest.approx(2.5 * (1 - 0.25**1.5) / 1.5)
    assert pareto(torch.tensor([0.0, 2.0]), 0.1) == pytest.approx(math.log(10))  # mean = deviation
    spread = math.log(2.5) - math.log(4) / 2
    shape = (3 - spread + math.sqrt((spread - 3) ** 2 + 24 * spread)) / (12 * spread)
    threshold = gamma(torch.tensor([1.0, 4.0]), 0.1)
    assert float(torch.special.gammaincc(torch.tensor(shape), torch.tensor(threshold * shape / 2.5))) == (
        pytest.approx(0.1, rel=1e-4)
    )
    for fit in (pareto, gamma):
        assert fit(torch.full((9,), 2.0), 0.1) == pytest.approx(2, rel=1e-3)  # nothing to fit a shape to


@pytest.mark.parametrize("share", [0.5, 0.01, 1e-6])
def test_quantiles_of_the_gamma_distribution(share: float) -> None:
    assert sidco.gamma_quantile(1.0, share) == pytest.approx(-math.log(share))
    x = sidco.gamma_quantile(2.0, share)
    assert (1 + x) * math.exp(-x) == pytest.approx(share)
    assert math.erfc(math.sqrt(sidco.gamma_quantile(0.5, share))) == pytest.approx(share)


@pytest.mark.parametrize("shape", [math.nan, math.inf, 0.0, 1e300])
def test_the_search_for_a_quantile_ends_whatever_was_fitted(shape: float) -> None:
    assert sidco.gamma_quantile(shape, 0.1) >= 0


@pytest.mark.parametrize("fit", sidco.FITS)
def test_a_stage_of_sidco_is_right_where_its_distribution_fits_and_off_where_it_does_not(fit: str) -> None:
    counts = {name: sidco.select(draw(), K, 1, fit).numel() / K for name, draw in DATA.items()}
    assert counts[fit] == pytest.approx(1, abs=0.1)
    assert counts["exponential"] == pytest.approx(1, abs=0.1), "gamma and Pareto contain it"
    assert abs(math.log(counts["normal"])) > math.log(1.5)
    assert counts["skewed"] > 1.5


def stages_after(scheme: Sidco, draw: Callable[[], Tensor], steps: int, stages: int = 1) -> int:
    state = sidco.State(stages=stages)
    for step in range(steps):
        state = lockstep.run([scheme.step(draw(), state, Ctx(0, 1, step))])[0].state
    return state.stages


def test_sidco_adds_a_stage_every_five_steps_while_too_few_are_selected() -> None:
    """Half-normal tails are lighter than exponential: one stage finds 3 %, two 65 %, three are enough."""
    scheme = Sidco(density=0.01)
    assert [stages_after(scheme, DATA["normal"], steps) for steps in (4, 5, 10, 15)] == [1, 2, 3, 3]


def test_sidco_drops_a_stage_where_too_many_are_selected_and_keeps_to_its_bounds() -> None:
    assert stages_after(Sidco(density=0.01), DATA["normal"], 5, stages=4) == 3
    assert stages_after(Sidco(density=0.3), DATA["normal"], 20) <= 2
    assert stages_after(Sidco(density=0.01), lambda: 0 * DATA["normal"](), 50) == 7  # log2 of 100


def test_the_published_rule_for_stages_has_no_answer_to_a_heavy_tail() -> None:
    """Too many are selected, so that it would drop a stage, where one more would be right."""
    skewed = DATA["skewed"]()
    assert stages_after(Sidco(density=0.01), DATA["skewed"], 10) == 1
    assert sidco.select(skewed, K, 1, "exponential").numel() > 5 * K
    assert sidco.select(skewed, K, 2, "exponential").numel() == pytest.approx(K, rel=0.1)


def test_stages_are_each_ranks_own_and_each_units_own() -> None:
    """The published bug: one count of stages for all tensors."""
    fleet = VirtualRanks(Sidco(density=0.01), [N, N], 2)

    def gradients(step: int, rank: int, unit: int) -> Tensor:
        light = (rank, unit) == (1, 0)
        return DATA["normal" if light else "exponential"]() - fleet.residuals[rank][unit]

    for _ in fleet.advance(gradients, 5):
        pass
    assert [[state.stages for state in states] for states in fleet.states] == [[1, 1], [2, 1]]


def test_a_distribution_that_sidco_does_not_know_is_refused() -> None:
    with pytest.raises(ConfigError, match="fit must be one of exponential, gamma, pareto, not 'normal'"):
        Sidco(fit="normal")  # type: ignore[arg-type]


@pytest.mark.parametrize("fit", sidco.FITS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_no_fit_chokes_on_what_is_not_finite(fit: str, bad: float) -> None:
    """The laws run the exponential fit; the others have to stand the same."""
    acc = DATA["normal"]()[:500]
    acc[7] = bad
    for stages in (1, 3):
        mine = sidco.select(acc, 10, stages, fit)
        assert bool((mine[1:] > mine[:-1]).all())
    everywhere = spent_by(Sidco(density=0.02, fit=fit), torch.full((50,), bad))  # type: ignore[arg-type]
    assert everywhere == [] if math.isnan(bad) else len(everywhere) >= 1


# DGC


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("step", [0, 1, 1000])
@pytest.mark.parametrize("k", [1, 100, K, N // 3])
def test_dgc_selects_about_k_of_anything(data: str, step: int, k: int) -> None:
    acc = DATA[data]()
    mine = dgc.select(acc, k, step)
    assert 0.8 * k <= mine.numel() <= 1.3 * k
    assert torch.equal(mine, largest(acc, mine.numel())), "not the largest ones"


def misled(sampled: float) -> tuple[Tensor, Tensor]:
    """10,000 elements from 5 to 10, growing with the index, where step 0 does not look; and where it does."""
    acc = torch.linspace(5, 10, 10_000)
    places = torch.arange(0, 10_000, 31)  # k = 1,000 makes it 31: 32 of the sample above the threshold
    acc[places] = sampled
    return acc, places


def test_dgc_keeps_the_largest_survivors_and_not_the_first() -> None:
    """The release cuts by position, and here the largest are the last."""
    acc, _ = misled(sampled=1.0)
    assert above(acc, dgc.estimate(acc, K, 0)).numel() == 10_000
    mine = dgc.select(acc, K, 0)
    assert mine.tolist() == largest(acc, K).tolist()
    assert int(mine[0]) > 8_000


def test_dgc_lowers_a_threshold_that_too_few_reach() -> None:
    acc, places = misled(sampled=20.0)
    assert above(acc, dgc.estimate(acc, K, 0)).tolist() == places.tolist()
    # 20, 16, 12.8, 10.24, 8.192: more than 1.3 k reach the last.
    assert above(acc, 20 * 0.8**3).tolist() == places.tolist()
    assert above(acc, 20 * 0.8**4).numel() > 1.3 * K
    assert dgc.select(acc, K, 0).tolist() == largest(acc, K).tolist()


def test_dgc_sends_all_that_it_accepts_also_the_last_ones() -> None:
    """The published bug: of a count between k and 1.3 k the first k are sent."""
    acc = torch.linspace(1, 2, 10_000)
    acc[::31] -= 0.015  # where step 0 looks: its threshold is a little low
    mine = dgc.select(acc, K, 0)
    assert 1.1 * K < mine.numel() <= 1.3 * K
    assert torch.equal(mine, above(acc, dgc.estimate(acc, K, 0)))
    assert int(mine[-1]) == 9_999


def test_dgc_gives_up_after_ten_corrections() -> None:
    acc, places = misled(sampled=10 / 0.8**10 * 1.01)
    assert dgc.select(acc, K, 0).tolist() == places.tolist()


def test_dgc_looks_elsewhere_in_the_next_step() -> None:
    acc, _ = misled(sampled=1.0)
    assert dgc.estimate(acc, K, 0) == dgc.estimate(acc, K, 31) == 1.0
    for step in range(1, 31):
        assert dgc.estimate(acc, K, step) == pytest.approx(9.5, abs=0.1)


def test_a_sample_of_dgc_is_small_where_the_vector_is_large() -> None:
    """1 %, of which 1 % is above the threshold: an element outside it can be anything."""
    acc = torch.zeros(10**6)
    acc[::99] = 1.0
    assert dgc.estimate(acc, 10**4, 0) == 1.0
    assert dgc.estimate(acc, 10**4, 1) == 0.0


def test_dgc_through_its_door_sends_what_select_says() -> None:
    acc = DATA["skewed"]()
    assert spent_by(Dgc(density=0.01), acc) == dgc.select(acc, K, 0).tolist()
