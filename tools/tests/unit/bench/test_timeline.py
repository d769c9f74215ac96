"""From spans to a trace, a share that is hidden and a picture."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from gradsieve.pipeline.frame import Span
from gradsieve_tools.bench.step.measure import Plan
from gradsieve_tools.bench.step.timeline import (
    EXCHANGING,
    TRAINING,
    Event,
    Step,
    chrome_trace,
    events_of,
    hidden,
    read,
)
from gradsieve_tools.bench.step.timeline_plot import plot
from gradsieve_tools.cli.main import main

LAPS = [
    Span("forward", -1, 0.0, 2.0),
    Span("backward", -1, 2.0, 6.0),
    Span("sync", -1, 6.0, 9.0),
    Span("optimizer", -1, 9.0, 10.0),
]
PIPELINE = [
    Span("accumulate", 0, 3.0, 3.5),
    Span("select", 0, 3.5, 4.0),
    Span("exchange", 0, 4.0, 7.0),
    Span("select", 0, 7.0, 7.5),
    Span("apply", 0, 7.5, 8.0),
    Span("commit", 0, 8.0, 8.5),
    Span("waiting", -1, 6.0, 7.5),
]
PLAN = Plan(4, "100mbit", None, "mlp", 5000, 0.01, ["noop", "dense", "exdyna"], 1)


def test_spans_come_to_the_thread_they_ran_on() -> None:
    events = events_of(LAPS, PIPELINE)
    names = {thread: [e.name for e in events if e.thread == thread] for thread in (TRAINING, EXCHANGING)}
    assert names[TRAINING] == ["forward", "backward", "waiting", "apply", "commit", "check", "optimizer"]
    assert names[EXCHANGING] == ["accumulate", "select", "exchange", "select"]
    for thread in names:
        own = [event for event in events if event.thread == thread]
        assert all(one.stop <= other.start for one, other in pairwise(own))


def test_the_check_is_what_the_pipeline_does_not_account_for() -> None:
    (check,) = [event for event in events_of(LAPS, PIPELINE) if event.name == "check"]
    assert (check.start, check.stop) == (8.5, 9.0)
    (whole,) = [event for event in events_of(LAPS, []) if event.name == "check"]
    assert (whole.start, whole.stop) == (6.0, 9.0)


def test_hidden_is_the_exchange_behind_forward_and_backward() -> None:
    assert hidden(events_of(LAPS, PIPELINE)) == (2.0, 3.0)


def test_an_exchange_that_forward_waits_for_hides_behind_nothing() -> None:
    first = [Span("exchange", 0, 0.2, 1.0), Span("waiting", -1, 0.1, 1.5), Span("commit", 0, 1.0, 1.5)]
    events = events_of(LAPS, first)
    (forward,) = [event for event in events if event.name == "forward"]
    assert (forward.start, forward.stop) == (1.5, 2.0)
    assert hidden(events) == (0.0, 0.8)


@pytest.mark.parametrize(
    ("start", "stop", "behind"),
    [(6.0, 9.0, 0.0), (1.0, 3.0, 2.0), (0.0, 6.0, 6.0), (-1.0, 1.0, 1.0), (5.0, 12.0, 1.0)],
)
def test_hidden_wherever_the_exchange_lies(start: float, stop: float, behind: float) -> None:
    assert hidden(events_of(LAPS, [Span("exchange", 0, start, stop)])) == (behind, stop - start)


def test_an_exchange_in_pieces_is_the_sum_of_them_and_the_rest_of_the_thread_does_not_count() -> None:
    pieces = [Span("exchange", 0, 4.0, 5.0), Span("select", 0, 5.0, 5.5), Span("exchange", 1, 5.5, 7.0)]
    assert hidden(events_of(LAPS, pieces)) == (1.5, 2.5)
    assert hidden(events_of(LAPS, [])) == (0.0, 0.0)


def two_ranks(sync: str, late: float = 0.0) -> Step:
    events = events_of(LAPS, PIPELINE)
    later = [replace_times(event, 0.5) for event in events]
    return Step(sync, [[replace_times(event, late) for event in rank] for rank in (events, later)])


def replace_times(event: Event, by: float) -> Event:
    return event._replace(start=event.start + by, stop=event.stop + by)


def test_a_trace_has_a_process_a_rank_and_a_row_a_thread() -> None:
    trace = chrome_trace([two_ranks("exdyna", late=1e4)])
    named = {
        (e["name"], e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"
    }
    assert named["process_name", 1, 0] == "rank 1"
    assert [named["thread_name", 0, tid] for tid in (0, 1)] == [TRAINING, EXCHANGING]
    complete = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    exchange = [event for event in complete if event["name"] == "exchange"]
    assert [(e["pid"], e["tid"], e["ts"], e["dur"]) for e in exchange] == [
        (0, 1, 4e6, 3e6),
        (1, 1, 4.5e6, 3e6),
    ]
    assert len(complete) == 2 * (len(events_of(LAPS, PIPELINE)) + 1)
    assert json.loads(json.dumps(trace, allow_nan=False)) == trace


def test_spans_of_a_row_nest_or_follow_each_other() -> None:
    """Or viewers draw them wrongly; times that are no round numbers included."""
    thirds = [span._replace(start=span.start / 3, stop=span.stop / 3) for span in LAPS]
    spans = [span._replace(start=span.start / 3, stop=span.stop / 3) for span in PIPELINE]
    step = Step("exdyna", [[replace_times(event, 12345.678) for event in events_of(thirds, spans)]])
    rows = [e for e in chrome_trace([step])["traceEvents"] if e["ph"] == "X" and e["tid"] == 0]
    assert rows[0]["name"] == "exdyna"
    inside = sorted(rows[1:], key=lambda event: event["ts"])
    # 1e-6 us: a viewer reads decimals, Python adds floats
    assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-6 for a, b in pairwise(inside))
    assert inside[-1]["ts"] + inside[-1]["dur"] <= rows[0]["ts"] + rows[0]["dur"] + 1e-6


def test_syncs_follow_each_other_in_a_trace() -> None:
    trace = chrome_trace([two_ranks("exdyna", late=500.0), two_ranks("topk", late=100.0)])
    times = {
        sync: [(e["ts"], e["ts"] + e["dur"]) for e in trace["traceEvents"] if e.get("cat") == sync]
        for sync in ("exdyna", "topk")
    }
    assert min(start for start, _ in times["exdyna"]) == 0
    assert max(stop for _, stop in times["exdyna"]) < min(start for start, _ in times["topk"])


def test_events_survive_json() -> None:
    events = events_of(LAPS, PIPELINE)
    assert read(json.loads(json.dumps(events))) == events


def test_the_picture_has_a_panel_a_sync_and_a_legend_of_what_is_there(tmp_path: Path) -> None:
    one, both = tmp_path / "one.png", tmp_path / "both.png"
    plot([two_ranks("exdyna")], PLAN, one)
    plot([two_ranks("exdyna"), two_ranks("topk")], replace(PLAN, delay="5ms"), both)
    heights = [int.from_bytes(path.read_bytes()[20:24], "big") for path in (one, both)]
    assert heights[1] > 1.5 * heights[0]


def test_a_timeline_without_a_sync_of_ours_is_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--syncs", "fp16", "--trace", str(tmp_path / "trace.json")]
    assert main(["bench", "step", *arguments]) == 2
    assert "add one to --syncs" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
