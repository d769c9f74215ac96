"""Spans of stages: nothing is counted twice, and timing costs next to nothing."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
import torch

from gradsieve.pipeline.frame import Span, Timeline
from gradsieve_tools.bench.overhead import Case, Rank, step


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that is one second further whenever somebody looks."""
    seconds = iter(range(1000))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(seconds)))


@pytest.mark.usefixtures("ticks")
def test_seconds_are_those_of_all_spans_of_a_stage() -> None:
    timeline = Timeline()
    with timeline.stage("select", 3):  # 0 to 1
        pass
    with timeline.stage("commit"):  # 2 to 3
        pass
    with timeline.stage("select", 4):  # 4 to 5
        pass
    assert timeline.spans == [
        Span("select", 3, 0.0, 1.0),
        Span("commit", -1, 2.0, 3.0),
        Span("select", 4, 4.0, 5.0),
    ]
    assert timeline.seconds() == {"select": 2.0, "commit": 1.0}


@pytest.mark.usefixtures("ticks")
def test_a_stage_that_fails_is_closed() -> None:
    timeline = Timeline()
    with pytest.raises(ValueError, match="broken"), timeline.stage("select"):
        raise ValueError("broken")
    assert timeline.seconds() == {"select": 1.0}


@pytest.mark.usefixtures("ticks")
def test_add_reaches_from_its_start_to_now() -> None:
    timeline = Timeline()
    timeline.add("exchange", 2, -1.0)
    assert timeline.spans == [Span("exchange", 2, -1.0, 0.0)]


@torch.no_grad()
def test_no_span_of_a_step_lies_inside_another() -> None:
    """Nothing is counted twice: `seconds` adds spans up."""
    ranks = [Rank(Case("exdyna", "steps", 1, 2048**2, 0.001), 0)]
    ranks[0].train(torch.randn(2 * ranks[0].gradients[0].numel()))
    step(ranks)
    spans = sorted(ranks[0].pipeline.stats.timeline.spans, key=lambda span: span.start)
    assert {span.name for span in spans} == {"accumulate", "select", "exchange", "apply", "commit"}
    assert all(one.stop <= other.start for one, other in pairwise(spans))


# -- cost -------------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("elements", [2048**2, 3 * 2048**2])
def test_a_step_has_some_tens_of_spans_however_many_elements_there_are(elements: int) -> None:
    """A span costs microseconds and such a step tens of milliseconds: timing is less than a hundredth."""
    ranks = [Rank(Case("exdyna", "steps", 2, elements, 0.001), rank) for rank in range(2)]
    noise = torch.randn(2 * ranks[0].gradients[0].numel())
    for _ in range(4):
        for rank in ranks:
            rank.train(noise)
        step(ranks)
        assert all(5 <= len(rank.pipeline.stats.timeline.spans) <= 40 for rank in ranks)
    assert len(ranks[0].pipeline.units) == 1
