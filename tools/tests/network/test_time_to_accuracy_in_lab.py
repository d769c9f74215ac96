"""`bench time-to-accuracy` on two hosts: the usual syncs, a small model, a few steps."""

import json
from typing import Any

import pytest

from gradsieve_tools.cli.main import main

pytestmark = [pytest.mark.lab, pytest.mark.nightly]

STEPS = 12
SYNCS = ["dense", "fp16", "powersgd", "auto"]


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("time-to-accuracy") / "result.json"
    size = ["--hosts", "2", "--params", "5e4", "--density", "0.05", "--steps", str(STEPS)]
    asked = ["--task", "transformer", "--syncs", ",".join(SYNCS), "--rate", "1gbit", "--json", str(path)]
    assert main(["bench", "time-to-accuracy", *size, *asked]) == 0
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_every_sync_has_a_row_and_a_curve_that_ends_where_the_rule_says(result: dict[str, Any]) -> None:
    assert [row["sync"] for row in result["rows"]] == SYNCS
    for row in result["rows"]:
        (run,) = row["runs"]
        curve = run["curve"]
        assert curve["steps"] == list(range(1, len(curve["steps"]) + 1))
        assert len(curve["seconds"]) == len(curve["values"]) == len(curve["steps"])
        assert curve["seconds"] == sorted(curve["seconds"])
        limit = STEPS if row["sync"] == "dense" else 2 * STEPS
        if row["sync"] == "dense" or run["steps"] is None:
            assert curve["steps"][-1] == limit
        else:
            assert curve["steps"][-1] == run["steps"] == row["steps"] <= limit
            assert curve["seconds"][-1] == run["seconds"] == row["seconds"]
        assert min(curve["values"]) < 4.5, f"{row['sync']} learnt nothing"


def test_dense_sets_the_target_and_reaches_it_within_its_budget(result: dict[str, Any]) -> None:
    dense = result["rows"][0]
    last = dense["runs"][0]["curve"]["values"][-3:]
    (target,) = {run["target"] for row in result["rows"] for run in row["runs"]}
    assert target == pytest.approx(sum(last) / 3, abs=1e-6)
    assert dense["steps"] <= STEPS
    assert dense["times_dense"] == 1.0


def test_all_start_from_the_same_weights_on_the_same_batches(result: dict[str, Any]) -> None:
    """After one step, rounding to fp16 has moved hardly an answer, or the loss."""
    dense, fp16 = (row["runs"][0]["curve"]["values"][0] for row in result["rows"][:2])
    assert fp16 == pytest.approx(dense, abs=0.003)


def test_what_is_saved_in_bytes_is_seen_at_the_interface(result: dict[str, Any]) -> None:
    sent = {row["sync"]: row["bytes_sent"] for row in result["rows"]}
    gradient = 4 * 5e4  # of two ranks each sends the gradient once
    assert gradient < sent["dense"] < 1.5 * gradient
    assert sent["fp16"] < 0.7 * sent["dense"]
    for sync in SYNCS[2:]:
        assert sent[sync] < 0.5 * sent["dense"], sync
    for row in result["rows"]:
        assert row["bits"] == pytest.approx(8 * row["bytes_sent"] / 5e4, rel=0.1)  # widths come that close


def test_the_result_says_how_it_was_trained(result: dict[str, Any]) -> None:
    config = result["config"]
    trained = (config["optimizer"], config["learning_rate"], result["rows"][0]["runs"][0]["curve"]["metric"])
    assert trained == ("adamw", 2e-3, "loss")
