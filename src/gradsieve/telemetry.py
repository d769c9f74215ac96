"""What a rank did when: spans of named stages, a step at a time.

    with stage("decode"):      # inside a scheme or a codec: belongs to whichever step this thread is at
        ...

    @stage("partition")        # or all of a function, that is no generator
    def pack(...): ...

A stage inside another interrupts it, so that no moment is counted twice. A span costs about a microsecond and
a step has some tens of them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple


class Span(NamedTuple):
    name: str
    unit: int
    """Which unit of exchange it was for; -1 for the step as a whole."""
    start: float
    stop: float
    """By time.perf_counter()."""


@dataclass(slots=True)
class Timeline:
    """The spans of one step on one rank."""

    spans: list[Span] = field(default_factory=list)

    @contextmanager
    def stage(self, name: str, unit: int = -1) -> Iterator[None]:
        """This and the stages inside it are this timeline's. Not for what spans a `yield` of a program: on
        virtual ranks another program would then run inside it."""
        before = getattr(_here, "at", None)
        at = _At(self, name, unit, time.perf_counter(), before)
        if before is not None:
            before.pause(at.since)
        _here.at = at
        try:
            yield
        finally:
            _here.at = before
            now = time.perf_counter()
            at.pause(now)
            if before is not None:
                before.since = now

    def add(self, name: str, unit: int, start: float) -> None:
        """From `start` to now."""
        self.spans.append(Span(name, unit, start, time.perf_counter()))

    def seconds(self) -> dict[str, float]:
        """By stage."""
        total: dict[str, float] = {}
        for span in self.spans:
            total[span.name] = total.get(span.name, 0.0) + span.stop - span.start
        return total


@dataclass(slots=True)
class _At:
    """The stage that a thread is in."""

    timeline: Timeline
    name: str
    unit: int
    since: float
    outside: _At | None

    def pause(self, now: float) -> None:
        self.timeline.spans.append(Span(self.name, self.unit, self.since, now))


_here = threading.local()


@contextmanager
def stage(name: str) -> Iterator[None]:
    """A stage of whatever this thread is timing; nothing where it is timing nothing."""
    at: _At | None = getattr(_here, "at", None)
    if at is None:
        yield
        return
    with at.timeline.stage(name, at.unit):
        yield
