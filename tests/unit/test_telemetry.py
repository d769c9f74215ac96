"""Spans of stages: nothing is counted twice, threads do not mix, and timing costs next to nothing."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from gradsieve.telemetry import Span, Timeline, stage
from gradsieve_lab.bench.overhead import Case, Rank, step


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that is one second further whenever somebody looks."""
    seconds = iter(range(1000))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(seconds)))


@pytest.mark.usefixtures("ticks")
def test_a_stage_inside_another_interrupts_it() -> None:
    timeline = Timeline()
    with timeline.stage("select", 3):  # 0
        with stage("encode"):  # 1 to 2
            pass
        with stage("decode"):  # 3 to 4
            pass
    assert timeline.spans == [
        Span("select", 3, 0.0, 1.0),
        Span("encode", 3, 1.0, 2.0),
        Span("select", 3, 2.0, 3.0),
        Span("decode", 3, 3.0, 4.0),
        Span("select", 3, 4.0, 5.0),
    ]
    assert timeline.seconds() == {"select": 3.0, "encode": 1.0, "decode": 1.0}
    assert sum(timeline.seconds().values()) == 5.0, "from the first look at the clock to the last, once"


@pytest.mark.usefixtures("ticks")
def test_stages_go_three_deep_and_into_one_of_the_same_name() -> None:
    timeline = Timeline()
    with timeline.stage("apply"), stage("decode"), stage("decode"):
        pass
    assert timeline.seconds() == {"apply": 2.0, "decode": 3.0}
    assert [span.start for span in timeline.spans[1:]] == [span.stop for span in timeline.spans[:-1]]


@pytest.mark.usefixtures("ticks")
def test_a_stage_that_fails_is_closed_and_the_one_outside_goes_on() -> None:
    timeline = Timeline()
    with timeline.stage("select"):
        with pytest.raises(ValueError, match="broken"), stage("decode"):
            raise ValueError("broken")
        with stage("encode"):
            pass
    assert [span.name for span in timeline.spans] == ["select", "decode", "select", "encode", "select"]
    with stage("later"):
        pass
    assert "later" not in timeline.seconds()


@pytest.mark.usefixtures("ticks")
def test_another_timeline_inside_interrupts_this_one() -> None:
    outer, inner = Timeline(), Timeline()
    with outer.stage("commit"), inner.stage("select"), stage("encode"):
        pass
    assert inner.seconds() == {"select": 2.0, "encode": 1.0}
    assert outer.seconds() == {"commit": 2.0}


@pytest.mark.usefixtures("ticks")
def test_add_reaches_from_its_start_to_now() -> None:
    timeline = Timeline()
    timeline.add("exchange", 2, -1.0)
    assert timeline.spans == [Span("exchange", 2, -1.0, 0.0)]


def test_a_stage_outside_of_any_timeline_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody_asks() -> float:
        raise AssertionError("the clock was looked at")

    monkeypatch.setattr(time, "perf_counter", nobody_asks)
    ran = []
    with stage("encode"):
        ran.append(1)
    assert ran == [1]
    with pytest.raises(AssertionError, match="looked at"), Timeline().stage("encode"):
        pass  # the twin: a timeline does look


def test_threads_do_not_mix() -> None:
    """Both are inside their stages at once, and a third thread's stage belongs to nobody."""
    timelines = {name: Timeline() for name in ("one", "other")}
    both_inside = threading.Barrier(3, timeout=10)

    def work(name: str) -> None:
        with timelines[name].stage(f"{name} outside"):
            both_inside.wait()
            with stage(f"{name} inside"):
                both_inside.wait()

    threads = [threading.Thread(target=work, args=(name,)) for name in timelines]
    for thread in threads:
        thread.start()
    both_inside.wait()
    with stage("nobody's"):
        both_inside.wait()
    for thread in threads:
        thread.join()
    for name, timeline in timelines.items():
        assert [span.name for span in timeline.spans] == [
            f"{name} outside",
            f"{name} inside",
            f"{name} outside",
        ]


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
        assert all(8 <= len(rank.pipeline.stats.timeline.spans) <= 40 for rank in ranks)
    assert len(ranks[0].pipeline.units) == 1
