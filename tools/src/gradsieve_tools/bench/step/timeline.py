"""What every rank did when in one step: which thread, how much of the exchange was hidden, as a trace.

A rank has two threads. The one that trains computes, waits for the exchange and writes what it gave; the
other one exchanges. Spans of one thread never overlap, and all hosts of a lab share one clock.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from gradsieve.pipeline.frame import Span
from gradsieve_tools.bench.common.in_lab import most_anywhere

TRAINING, EXCHANGING = "training", "exchange"
THREADS = (TRAINING, EXCHANGING)
COMPUTING = ("forward", "backward")
_ON_THE_EXCHANGING_THREAD = ("accumulate", "select", "exchange")
_GAP = 0.1  # share of a step between two syncs in a trace


class Event(NamedTuple):
    thread: str
    name: str
    unit: int
    start: float
    stop: float  # seconds, by a clock that all ranks share


@dataclass(frozen=True, slots=True)
class Step:
    sync: str
    ranks: list[list[Event]]

    @property
    def start(self) -> float:
        return min(event.start for events in self.ranks for event in events)

    @property
    def stop(self) -> float:
        return max(event.stop for events in self.ranks for event in events)


def events_of(training: Sequence[Span], pipeline: Iterable[Span]) -> list[Event]:
    """Merge the laps of a training loop with the pipeline's spans. The rest of the lap "sync" is the
    check."""
    events = [
        Event(EXCHANGING if span.name in _ON_THE_EXCHANGING_THREAD else TRAINING, *span) for span in pipeline
    ]
    own = [event.stop for event in events if event.thread == TRAINING]
    for lap in training:
        if lap.name in ("sync", "forward"):
            name = "check" if lap.name == "sync" else lap.name
            inside = [stop for stop in own if lap.start <= stop <= lap.stop]
            events.append(Event(TRAINING, name, -1, max([lap.start, *inside]), lap.stop))
        else:
            events.append(Event(TRAINING, *lap))
    return sorted(events, key=lambda event: event.start)


def hidden(events: Iterable[Event]) -> tuple[float, float]:
    """Seconds of exchange that passed while this rank computed, and all seconds of exchange."""
    events = list(events)
    computing = [event for event in events if event.name in COMPUTING]
    exchange = [event for event in events if event.name == "exchange"]
    behind = sum(_overlap(one, other) for one in exchange for other in computing)
    return behind, sum(event.stop - event.start for event in exchange)


def _overlap(one: Event, other: Event) -> float:
    return max(0.0, min(one.stop, other.stop) - max(one.start, other.start))


def from_all_ranks(events: list[Event]) -> list[list[Event]]:
    """Collective: every rank's events, on every rank."""
    text = json.dumps(events).encode()
    length = int(most_anywhere(len(text)))
    own = torch.frombuffer(bytearray(text.ljust(length)), dtype=torch.uint8)  # JSON may end in blanks
    rows = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, own)
    return [read(json.loads(row.numpy().tobytes())) for row in rows]


def read(events: Iterable[Sequence[Any]]) -> list[Event]:
    return [Event(*event) for event in events]


def chrome_trace(steps: Sequence[Step]) -> dict[str, Any]:
    """Return a trace for Perfetto: a process a rank, a row a thread; syncs follow each other."""
    out: list[dict[str, Any]] = [
        {"ph": "M", "name": kind, "pid": rank, "tid": tid, "args": {"name": name}}
        for rank in range(max(len(step.ranks) for step in steps))
        for tid, thread in enumerate(THREADS)
        for kind, name in (("process_name", f"rank {rank}"), ("thread_name", thread))
    ]
    at = 0.0
    for step in steps:
        shift = at - step.start
        for rank, events in enumerate(step.ranks):
            whole = Event(TRAINING, step.sync, -1, step.start, max(event.stop for event in events))
            out += [_complete(step.sync, rank, event, shift) for event in [whole, *events]]
        at += (1 + _GAP) * (step.stop - step.start)
    return {"traceEvents": out, "displayTimeUnit": "ms"}


def _complete(sync: str, rank: int, event: Event, shift: float) -> dict[str, Any]:
    """Times are whole nanoseconds in microseconds: finer digits are the float's, and would break nesting."""
    start = round(1e6 * (event.start + shift), 3)
    return {
        "ph": "X",
        "name": event.name,
        "cat": sync,
        "pid": rank,
        "tid": THREADS.index(event.thread),
        "ts": start,
        "dur": round(round(1e6 * (event.stop + shift), 3) - start, 3),
        "args": {"unit": event.unit},
    }
