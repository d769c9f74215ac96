"""The self-test's findings from answers, its table and file, and the two processes that answer."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from gradsieve_tools.doctor.self_test import evaluate, pair
from gradsieve_tools.doctor.self_test.findings import Finding
from gradsieve_tools.doctor.self_test.pair import Pair, Unanswered

TRAINED = {"losses": [2.0, 1.0], "digest": 7}


def trained(**changes: Any) -> dict[str, Any]:
    return {**TRAINED, **changes}


def verdict_of_training(
    plain: Mapping[str, Any] = TRAINED,
    first: Mapping[str, Any] = TRAINED,
    second: Mapping[str, Any] = TRAINED,
) -> Finding:
    """Against a CPU that has what is usual."""
    return evaluate.training(plain, TRAINED, [first, second], [TRAINED, TRAINED])


def test_bits_are_asked_for_where_the_device_has_those_of_the_cpu() -> None:
    assert verdict_of_training().verdict == "ok"
    other = trained(losses=[2.0, math.nextafter(1.0, 2.0)])
    assert "rank 1: other bits" in verdict_of_training(second=other).found
    assert "ranks 0, 1: other bits" in verdict_of_training(first=other, second=other).found


@pytest.mark.parametrize(
    ("loss", "verdict"), [(1.009, "ok"), (1.011, "failed"), (math.nan, "failed"), (math.inf, "failed")]
)
def test_a_tolerance_is_kept_where_the_device_rounds_otherwise(loss: float, verdict: str) -> None:
    other = trained(losses=[2.0, loss], digest=8)
    found = verdict_of_training(trained(digest=9), other, other)
    assert found.verdict == verdict
    assert "0.01 is allowed" in found.found


def test_replicas_that_differ_fail_whatever_their_losses() -> None:
    found = verdict_of_training(trained(digest=9), trained(), trained(digest=8))
    assert (found.verdict, found.found) == ("failed", "the ranks end with different models")


@pytest.mark.parametrize(
    ("form", "rate", "verdict"),
    [("numba", 0.4, "ok"), ("numba", 0.2, "failed"), ("torch", 0.2, "ok"), ("torch", 0.005, "failed")],
)
def test_a_kernel_is_slow_by_what_its_form_can_do(form: str, rate: float, verdict: str) -> None:
    said = {"copy": 10.0, "elements": 1, "kernels": {"a": rate, "b": 9.0}, "forms": {"a": form, "b": form}}
    found = evaluate.bandwidth(said)
    assert found.verdict == verdict
    assert "a is the slowest" in found.found


def test_what_grows_in_every_stretch_is_a_leak() -> None:
    def found(*grown: int) -> str:
        said = {"grown": {"process": list(grown), "device": [0, 0, 0]}, "model": 1000}
        still = {"grown": {"process": [0, 0, 0], "device": [0, 0, 0]}, "model": 1000}
        return evaluate.memory([still, said], 10).verdict

    assert found(90_000, 0, 90_000) == "ok"
    assert found(1000, 1000, 1000) == "ok"
    assert found(1001, 90_000, 1001) == "failed"


@pytest.mark.parametrize(
    ("named", "seconds", "verdict"),
    [
        ([1], 0.1, "ok"),
        ([1], 11.0, "failed"),
        ([], 0.1, "failed"),
        ([0], 0.1, "failed"),
        ([0, 1], 0.1, "failed"),
    ],
)
def test_a_dead_rank_is_named_alone_and_soon(named: list[int], seconds: float, verdict: str) -> None:
    assert evaluate.death({"named": named, "seconds": seconds}).verdict == verdict


FOUND = {"bits": 0.75, "sent": 0.7, "every": 3, "chosen": True, "step seconds": 0.01}


def test_a_budget_is_one_for_all() -> None:
    assert evaluate.budget([FOUND, FOUND], 300).found == (
        "0.75 bits a parameter and step, every 3 steps; a step takes 10 ms"
    )
    assert evaluate.budget([FOUND, FOUND | {"bits": 0.5}], 300).verdict == "failed"


RANKS = {
    "silent": "import time\ntime.sleep(60)",
    "dead": "import os\nos._exit(3)",
}


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    (tmp_path / "stand_in_rank.py").write_text(RANKS[request.param])
    monkeypatch.setattr(pair, "MODULE", "stand_in_rank")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setattr(pair, "LIMIT", 20.0 if request.param != "silent" else 0.3)


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize(
    ("ranks", "said"),
    [("silent", r"no answer within 0\.3 s"), ("dead", "its process ended with code 3")],
    indirect=["ranks"],
)
def test_a_rank_that_does_not_answer_is_named(said: str) -> None:
    with Pair() as both, pytest.raises(Unanswered, match=f"rank 0: {said}; rank 1: {said}"):
        both.ask("echo", x=1)
