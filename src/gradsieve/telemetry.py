"""What a rank did when: spans of named stages, a step at a time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple


class Span(NamedTuple):
    name: str
    # Of the unit that was exchanged; -1 for the step as a whole.
    unit: int
    # In seconds, by time.perf_counter().
    start: float
    stop: float


@dataclass(slots=True)
class Timeline:
    """The spans of one step on one rank; none lies inside another."""

    spans: list[Span] = field(default_factory=list)

    @contextmanager
    def stage(self, name: str, unit: int = -1) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, unit, start)

    def add(self, name: str, unit: int, start: float) -> None:
        """Adds the span from `start` to now."""
        self.spans.append(Span(name, unit, start, time.perf_counter()))

    def seconds(self) -> dict[str, float]:
        """The sum of all spans of a stage, by stage."""
        total: dict[str, float] = {}
        for span in self.spans:
            total[span.name] = total.get(span.name, 0.0) + span.stop - span.start
        return total
