"""`bench time-to-accuracy` without its network: the rule, the summary, wrong arguments."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest

from gradsieve_tools.bench.common.race import Curve, Run
from gradsieve_tools.bench.tasks.training import BETTER, Metric
from gradsieve_tools.bench.time_to_accuracy.measure import Plan, summary
from gradsieve_tools.emulation import Lab

PLAN = Plan(4, "1gbit", None, "mlp", 20_000, 0.01, ["dense", "exdyna"], steps=600, seeds=1)
METRICS: tuple[Metric, ...] = ("accuracy", "loss")


@pytest.fixture(autouse=True)
def no_lab(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not refused in time fails here, rather than after minutes of training."""
    monkeypatch.setattr(Lab, "__enter__", lambda _: pytest.fail("a lab was opened"))


def curve(*values: float, step_seconds: float = 1.0, metric: Metric = "accuracy") -> Curve:
    places = range(1, len(values) + 1)
    return Curve(
        metric, [10 * place for place in places], [10 * step_seconds * place for place in places], [*values]
    )


def mirrored(metric: Metric, *values: float) -> list[float]:
    """Accuracies as they are; as losses, what is as far above 0.8 as an accuracy is below it."""
    return [0.8 + BETTER[metric] * (value - 0.8) for value in values]


# -- the rule -------------------------------------------------------------------------------------------


def test_an_evaluation_counts_with_the_two_before_it() -> None:
    assert curve(0.1, 0.2, 0.6, 0.7).smoothed == [0.3, 0.5]


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize(
    ("values", "place"),
    [
        ((0.5, 0.6, 0.7, 0.8, 0.9), 4),  # 0.8 is reached at the very end
        ((0.5, 0.6, 0.7, 0.8, 0.89), None),  # and here almost
        ((0.5, 0.99, 0.5, 0.5), None),  # one lucky evaluation is not enough
        ((0.8, 0.8, 0.8, 0.1, 0.9), 2),  # the first time counts, whatever follows
        ((0.9, 0.9), None),  # two evaluations have no smoothed value yet
        ((), None),
        ((0.5, 0.6, math.nan, 0.9, 0.9), None),  # what diverged is not there, whatever it did before
    ],
)
def test_the_target_is_reached_when_the_mean_of_three_first_is_not_worse(
    values: tuple[float, ...], place: int | None, metric: Metric
) -> None:
    assert curve(*mirrored(metric, *values), metric=metric).crossing(0.8) == place


def test_evaluations_are_even_and_one_ends_the_budget() -> None:
    dense, other = PLAN.evaluations("dense"), PLAN.evaluations("exdyna")
    assert dense == [20 * place for place in range(1, 31)]
    assert other[:30] == dense
    assert other[-1] == 1200
    uneven = replace(PLAN, steps=100).evaluations("dense")
    assert (len(uneven), uneven[-1]) == (30, 100)
    assert {after - before for before, after in pairwise(uneven)} == {3, 4}
    assert replace(PLAN, steps=4).evaluations("exdyna") == [1, 2, 3, 4, 5, 6, 7, 8]


# -- summary --------------------------------------------------------------------------------------------


def run(sync: str, seed: int, step_seconds: float, *values: float, metric: Metric = "accuracy") -> Run:
    shown = curve(*mirrored(metric, *values), step_seconds=step_seconds, metric=metric)
    return Run(sync, seed, 0.8, shown, bytes_sent=400, parameters=50)


RUNS = [
    run("dense", 0, 2.0, 0.7, 0.7, 0.8, 0.9),
    run("exdyna", 0, 1.0, 0.7, 0.8, 0.9),
    run("topk", 0, 1.0, 0.8, 0.8, 0.8),
    run("dense", 1, 3.0, 0.7, 0.7, 0.8, 0.9),
    run("exdyna", 1, 0.5, 0.7, 0.7, 0.8, 0.9),
    run("topk", 1, 1.0, 0.7, 0.7, 0.7, 0.7),
]


def test_a_row_holds_means_over_seeds_against_dense_of_the_same_seed() -> None:
    dense, exdyna, _ = summary(RUNS)
    assert (dense["seconds"], dense["steps"], dense["times_dense"], dense["spread"]) == (100, 40, 1, 0)
    assert (exdyna["seconds"], exdyna["steps"]) == (25, 35)
    assert exdyna["times_dense"] == pytest.approx((80 / 30 + 120 / 20) / 2)
    assert exdyna["spread"] == pytest.approx((120 / 20 - 80 / 30) / 2**0.5)
    assert exdyna["step_ms"] == 750
    assert exdyna["bytes_sent"] == pytest.approx((400 / 30 + 400 / 40) / 2)
    assert exdyna["bits"] == pytest.approx(8 * exdyna["bytes_sent"] / 50)
    assert [each["seconds"] for each in exdyna["runs"]] == [30, 20]
    assert exdyna["runs"][0]["curve"]["values"] == [0.7, 0.8, 0.9]


def test_a_seed_that_never_got_there_leaves_no_mean_to_boast_of() -> None:
    third = [run(sync, 2, 1.0, 0.8, 0.8, 0.8) for sync in ("dense", "topk")]
    topk = summary([*RUNS, *third])[2]
    assert topk["reached"] == "2 of 3"
    assert [topk[name] for name in ("seconds", "steps", "times_dense", "spread")] == [None] * 4
    assert topk["final"] == pytest.approx((0.8 + 0.7 + 0.8) / 3)
