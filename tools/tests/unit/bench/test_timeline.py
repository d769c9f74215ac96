"""From spans to a trace, a share that is hidden and a picture."""

from __future__ import annotations

from itertools import pairwise

import pytest

from gradsieve.pipeline.frame import Span
from gradsieve_tools.bench.step.timeline import (
    EXCHANGING,
    TRAINING,
    events_of,
    hidden,
)

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


def test_spans_come_to_the_thread_they_ran_on() -> None:
    events = events_of(LAPS, PIPELINE)
    names = {thread: [e.name for e in events if e.thread == thread] for thread in (TRAINING, EXCHANGING)}
    assert names[TRAINING] == ["forward", "backward", "waiting", "apply", "commit", "check", "optimizer"]
    assert names[EXCHANGING] == ["accumulate", "select", "exchange", "select"]
    for thread in names:
        own = [event for event in events if event.thread == thread]
        assert all(one.stop <= other.start for one, other in pairwise(own))


def test_hidden_is_the_exchange_behind_forward_and_backward() -> None:
    assert hidden(events_of(LAPS, PIPELINE)) == (2.0, 3.0)


@pytest.mark.parametrize(
    ("start", "stop", "behind"),
    [(6.0, 9.0, 0.0), (1.0, 3.0, 2.0), (0.0, 6.0, 6.0), (-1.0, 1.0, 1.0), (5.0, 12.0, 1.0)],
)
def test_hidden_wherever_the_exchange_lies(start: float, stop: float, behind: float) -> None:
    assert hidden(events_of(LAPS, [Span("exchange", 0, start, stop)])) == (behind, stop - start)
