"""The plan against steps that others measured on GPUs."""

from pathlib import Path

import pytest

from gradsieve_tools.costs import STALLED
from gradsieve_tools.plan_validation import against
from gradsieve_tools.plan_validation.against import Cluster, compare, fit_stalled, summary

FILE = Path(__file__).parents[4] / "benchmarks" / "results" / "gpu-cluster-2026-08-16.json"
CLUSTER = Cluster.read(FILE)
RATES = (50e6, 200e6, 1e9, 5e9)


def test_all_21_points_are_predicted_and_none_is_far_off() -> None:
    found = summary(compare(CLUSTER))
    assert found["points"] == 21
    assert found["median_off"] <= 0.15
    assert found["most_off"] <= 0.40


def test_with_a_cpus_memory_and_gloos_sums_they_would_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin: what the plan took for granted before, at the rate of one stream."""
    monkeypatch.setattr(against, "_DEVICE", "cpu")
    before = Cluster(CLUSTER.rows, 9.53e9, CLUSTER.source)
    assert summary(compare(before))["most_off"] > 0.40


def test_the_constant_is_what_a_fit_to_other_rows_finds() -> None:
    assert fit_stalled(CLUSTER) == pytest.approx(STALLED, rel=0.01)


@pytest.mark.parametrize("rate", RATES)
def test_a_rate_is_predicted_from_the_others(rate: float) -> None:
    """Leave one out: the worst is 50 Mbit/s, below all rates that are left."""
    stalled = fit_stalled(CLUSTER, without=rate)
    own = [row for row in CLUSTER.rows if row["algorithm"] == "diloco" and row["link_bps"] == rate]
    measured = [against.times(row) for row in own if row["H"] == 1]
    assert len(measured) == 3
    for each in measured:
        assert (1 + stalled / rate) / each == pytest.approx(1.0, abs=0.2)
