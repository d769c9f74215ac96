"""Each law of `gradsieve.testing` is red on a scheme that breaks it, and green on an honest one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import pytest
import torch

from gradsieve.schemes.base import Scheme
from gradsieve.testing.gradients import Source
from gradsieve.testing.laws import (
    check_conservation,
    check_drained,
    check_indices,
    check_is_dense_sum,
    check_nothing_lost,
    check_nothing_mutated,
    check_one_threshold,
    check_replicated,
    same_bits,
)
from gradsieve.testing.ranks import Round, VirtualRanks
from laws import toys

N, WORLD = 32, 3
Check = Callable[[Round], None]


def rounds_of(scheme: Scheme[Any], check: Check, kind: str = "normal", steps: int = 4) -> VirtualRanks:
    fleet = VirtualRanks(scheme, [N], WORLD)
    for round_ in fleet.advance(Source(kind, (N,)), steps):
        check(round_)
    return fleet


def exactly(round_: Round) -> None:
    check_conservation(round_, exact=True)


def within_rounding(round_: Round) -> None:
    check_conservation(round_, exact=False)


def replicated(round_: Round) -> None:
    check_replicated(round_.outcomes)


def indices(round_: Round) -> None:
    check_indices(round_.outcomes[0].update, N)


BROKEN: Sequence[tuple[type[Scheme[Any]], Check, str, str]] = [
    (toys.LosesMass, exactly, "integers", "spent and update differ"),
    (toys.LosesMass, within_rounding, "normal", "spent and update differ"),
    (toys.RoundsAway, within_rounding, "normal", "spent and update differ"),
    (toys.RankDependent, replicated, "normal", "rank 1 has another update"),
    (toys.RankDependent, replicated, "zeros", "rank 1 has another update"),
    (toys.DivergentState, replicated, "normal", "rank 1 has another state"),
    (toys.Unsorted, indices, "normal", "not sorted"),
    (toys.Duplicate, indices, "normal", "not sorted"),
    (toys.BeyondTheEnd, indices, "normal", "beyond"),
    (toys.Negative, indices, "normal", "negative"),
    (toys.MutatesAcc, check_nothing_mutated, "normal", "acc was changed"),
    (toys.MutatesState, check_nothing_mutated, "normal", "state handed in was changed"),
]


@pytest.mark.parametrize(("broken", "check", "kind", "message"), BROKEN)
def test_check_flags_the_scheme_that_breaks_its_law(
    broken: type[Scheme[Any]], check: Check, kind: str, message: str
) -> None:
    with pytest.raises(AssertionError, match=message):
        rounds_of(broken(), check, kind)
    rounds_of(toys.Toy(), check, kind)


def test_check_of_density_one_flags_a_scheme_that_stays_sparse() -> None:
    with pytest.raises(AssertionError, match="not the dense sum"):
        rounds_of(toys.NeverDense(density=1.0), check_is_dense_sum)
    rounds_of(toys.Toy(density=1.0), check_is_dense_sum)


def test_check_of_the_dense_sum_flags_a_sum_in_another_order() -> None:
    def reversed_ranks(round_: Round) -> None:
        shuffled = Round(**{**round_.__dict__, "accs_before": round_.accs_before[::-1]})
        check_is_dense_sum(shuffled)

    with pytest.raises(AssertionError, match="not the dense sum"):
        rounds_of(toys.Toy(density=1.0), reversed_ranks)


def test_check_of_one_threshold_flags_buckets_that_differ() -> None:
    for scheme, fails in ((toys.ThresholdPerBucket(), True), (toys.Toy(), False)):
        fleet = VirtualRanks(scheme, [5, 7], WORLD)
        for _ in fleet.advance(Source("normal", (5, 7)), 1):
            pass
        if fails:
            with pytest.raises(AssertionError, match="thresholds"):
                check_one_threshold(fleet.states[0])
        else:
            check_one_threshold(fleet.states[0])


def test_check_of_draining_flags_a_scheme_that_starves_elements() -> None:
    honest, starving = (rounds_of(kind(), lambda _: None, "constant", 1) for kind in (toys.Toy, toys.Starves))
    for fleet in (honest, starving):
        for _ in fleet.advance(lambda *_: torch.zeros(N), 6):
            pass
    check_drained(list(chain(*honest.residuals)))
    with pytest.raises(AssertionError, match="stay in the residual"):
        check_drained(list(chain(*starving.residuals)))


def test_check_of_a_run_flags_a_residual_that_was_dropped() -> None:
    source = Source("integers", (N,))
    gradients, updates = torch.zeros(N), torch.zeros(N)
    fleet = VirtualRanks(toys.Toy(), [N], WORLD)
    for round_ in fleet.advance(source, 4):
        updates += round_.outcomes[0].update.to_dense()
        gradients += sum(source(round_.step, rank, 0) for rank in range(WORLD))
    residuals = torch.stack([buckets[0] for buckets in fleet.residuals]).sum(0)
    check_nothing_lost(gradients, updates, residuals, torch.zeros(N))
    with pytest.raises(AssertionError, match="lost or made up"):
        check_nothing_lost(gradients, updates, torch.zeros(N), torch.zeros(N))


def test_a_crash_on_nan_comes_through_the_driver() -> None:
    fleet = VirtualRanks(toys.FearsNan(), [N], WORLD)
    with pytest.raises(ValueError, match=r"cannot convert float NaN"):
        list(fleet.advance(lambda *_: torch.full((N,), torch.nan), 1))


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (torch.tensor([0.0]), torch.tensor([-0.0])),
        (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64)),
        (torch.tensor([1, 2]), torch.tensor([1])),
        (0.0, -0.0),
        ([1, 2], [1]),
        (1, 1.0),
        (toys.State(torch.ones(1)), toys.State(torch.zeros(1))),
    ],
)
def test_same_bits_tells_apart_what_equality_does_not(left: Any, right: Any) -> None:
    assert not same_bits(left, right)
    assert same_bits(left, left)
    assert same_bits([float("nan"), torch.tensor([torch.nan])], [float("nan"), torch.tensor([torch.nan])])
