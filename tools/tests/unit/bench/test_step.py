"""`bench step`: models of the size asked for, and ratios that say nothing are named."""

from __future__ import annotations

from typing import Any

import pytest

from gradsieve_tools.bench.common.workloads import WORKLOADS, batch_for, build
from gradsieve_tools.bench.step.measure import of_link, unclear


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("params", [50_000, 1e6, 2.2e6, 3e6, 4e6, 5e6])
def test_a_model_has_about_the_size_asked_for_and_takes_its_batch(workload: str, params: float) -> None:
    model = build(workload, int(params))
    assert 0.66 < sum(p.numel() for p in model.parameters()) / params < 1.34
    inputs, target = batch_for(workload, int(params))
    assert model(inputs).shape == target.shape


def row(sync: str, vs_noop: list[float], vs_dense: list[float], rounds: int = 5) -> dict[str, Any]:
    return {
        "sync": sync,
        "vs_noop_half": vs_noop,
        "vs_dense_half": vs_dense,
        "step_ms_all": [1.0] * rounds,
    }


def test_a_ratio_that_says_nothing_is_named() -> None:
    line = unclear(
        [row("noop", [1, 1], [2, 2]), row("topk", [0.76, 6.88], [3, 3.1]), row("micro", [1, 1], [1, 1])]
    )
    assert line is not None
    assert "vs_noop of topk (0.76 to 6.88): more --rounds" in line
    assert "noop," not in line
    assert "micro" not in line


def test_what_is_sent_is_held_against_what_the_link_carries_while_nobody_communicates() -> None:
    noop = {"sync": "noop", "step_ms": 200.0, "bytes_sent": 0}
    ours = {"sync": "auto", "step_ms": 400.0, "bytes_sent": 1_000_000}
    assert of_link(ours, [noop, ours], "100mbit") == 0.4
    assert of_link(ours, [noop, ours], None) is None
