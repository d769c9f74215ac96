"""Inside torchft, with a real lighthouse and real signals: what a death costs, and what a stop does not."""

from __future__ import annotations

from typing import Any

import pytest

from gradsieve.bench.elastic import measure as elastic
from gradsieve.bench.elastic.replica import Plan


def trained(steps: int, faults: elastic.Faults) -> dict[str, Any]:
    plan = Plan("transformer", 3, steps, {"bits": 1.0}, 0, deadline=3.0, least=1, judged=False)
    row = elastic.measure(plan, faults)
    assert row["alike"], "replicas ended with different models"
    return row


def test_a_death_costs_an_exchange_and_what_waited_there_is_told() -> None:
    row = trained(6, elastic.Faults(kill_every=3))
    assert row["kills"] == 1
    assert row["replicas_missing"] == 1
    [loss] = row["losses"]
    assert loss["name"] == "1.0"
    assert 2 <= loss["exchange"] <= 4, "it made exchanges 0 to 2, and perhaps the one in which it was killed"
    assert row["lost_mass"] == pytest.approx(loss["waiting"])
    assert row["lost_mass"] > 0.01


def test_one_that_is_stopped_is_not_waited_for_and_loses_nothing() -> None:
    """Longer than torchft waits for a heartbeat; it is back before the others are done."""
    row = trained(11, elastic.Faults(stop_every=6, stop_seconds=0.8))
    assert (row["stops"], row["back"]) == (1, 1)
    assert (row["replicas_missing"], row["lost_mass"]) == (0, 0)
