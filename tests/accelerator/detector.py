"""Races in a trace of the fake device (`device.cpp`, `recorder.py`), found by happens-before.

Each stream, each thread of the host and each op of gloo has a vector clock: how much of everybody's work is
over before its own next piece. A stream takes the clock of the thread that queues something on it; an event
carries a stream's clock to whoever waits for it; queues and futures carry that of a thread. Two touches of
the same memory, one of them a write, of which neither is in the other's clock are a race: they may happen in
either order, whatever the order was in which the fake device ran them.

Memory that is freed may be what the same stream allocates next, as torch's allocator for GPUs has it: work of
another stream that may not be over when the new owner begins is a race, unless the memory was lent to that
stream (`record_stream`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

Clock = dict[str, int]


@dataclass(frozen=True)
class Line:
    """Of a trace, as `device.cpp` writes it."""

    kind: str
    thread: str
    stream: str
    what: str
    """An operator, an event, an address, or what carries a thread's clock."""
    touched: tuple[tuple[bool, int, int, int], ...] = ()
    """Whether it was written, the address at which its memory begins, and from where to where."""
    where: str = ""

    @classmethod
    def of(cls, text: str) -> Line:
        kind, thread, stream, what, touched, where = text.split("\t")
        parts = [part.split(":") for part in touched.split()]
        ranges = tuple((how == "w", int(begin), int(start), int(stop)) for how, begin, start, stop in parts)
        return cls(kind, f"thread {thread}", f"stream {stream}", what, ranges, where)


@dataclass(frozen=True)
class Touch:
    by: str
    time: int
    is_write: bool
    start: int
    stop: int
    line: Line

    def is_before(self, clock: Clock) -> bool:
        return clock.get(self.by, 0) >= self.time

    def describe(self) -> str:
        verb = "writes" if self.is_write else "reads"
        return f"{self.line.what} on {self.by} {verb} at {self.line.where or 'C++'}"


@dataclass
class Memory:
    """One piece of it, since it was allocated."""

    owner: str | None = None
    """The stream that gets it back; None for pinned memory, and for what is older than the trace."""
    touches: list[Touch] = field(default_factory=list)
    lent_to: set[str] = field(default_factory=set)
    before: list[Touch] = field(default_factory=list)
    """Of whoever may have had this memory before, and was not over when it was freed."""


class Detector:
    def __init__(self) -> None:
        self.races: list[str] = []
        self.pieces = 0
        """Of work that were looked at: a trace in which nothing happened proves nothing."""
        self._clocks: dict[str, Clock] = {}
        self._kept: dict[str, Clock] = {}
        """The clocks that events, futures and queues carry."""
        self._pending: dict[str, list[str]] = {}
        """Gloo's ops that a thread has not waited for."""
        self._memory: dict[int, Memory] = {}
        self._freed: dict[str, list[Touch]] = {}
        """By stream: of memory that it may get again, what was not over when it was freed."""
        self._named: set[str] = set()
        self._backward: str | None = None

    def read(self, lines: Iterable[Line]) -> Detector:
        for line in lines:
            getattr(self, f"_{line.kind}")(line, self._thread_of(line))
        return self

    def _thread_of(self, line: Line) -> str:
        """Autograd's threads, which nobody in Python started, work for one that waits for them: as if they
        were that one."""
        if line.kind == "thread":
            self._named.add(line.thread)
        return line.thread if line.thread in self._named else self._backward or line.thread

    def _clock(self, of: str) -> Clock:
        return self._clocks.setdefault(of, {})

    # -- lines that order -----------------------------------------------------------------------------

    def _thread(self, line: Line, thread: str) -> None:
        """A thread of Python's is at work."""

    def _backward_begins(self, line: Line, thread: str) -> None:
        self._backward = thread

    def _release(self, line: Line, thread: str) -> None:
        """Whoever acquires this comes after."""
        self._kept[line.what] = dict(self._clock(thread))

    def _acquire(self, line: Line, thread: str) -> None:
        _join(self._clock(thread), self._kept.get(line.what, {}))

    def _record(self, line: Line, thread: str) -> None:
        self._kept[f"event {line.what}"] = dict(_join(self._clock(line.stream), self._clock(thread)))

    def _block(self, line: Line, thread: str) -> None:
        stream = _join(self._clock(line.stream), self._clock(thread))
        _join(stream, self._kept.get(f"event {line.what}", {}))

    def _wait_event(self, line: Line, thread: str) -> None:
        _join(self._clock(thread), self._kept.get(f"event {line.what}", {}))

    def _wait_stream(self, line: Line, thread: str) -> None:
        _join(self._clock(thread), self._clock(line.stream))

    def _wait_device(self, line: Line, thread: str) -> None:
        for name, clock in list(self._clocks.items()):
            if name.startswith("stream"):
                _join(self._clock(thread), clock)

    def _read_time(self, line: Line, thread: str) -> None:
        recorded = self._kept.get(f"event {line.what}", {})
        if not _covers(self._clock(thread), recorded):
            self._report(f"the time of an event is read on {thread}, which the device may not have reached")

    # -- lines that touch memory ----------------------------------------------------------------------

    def _launch(self, line: Line, thread: str) -> None:
        _join(self._clock(line.stream), self._clock(thread))
        self._work(line, line.stream)

    def _launch_and_wait(self, line: Line, thread: str) -> None:
        self._launch(line, thread)
        self._wait_stream(line, thread)

    def _host(self, line: Line, thread: str) -> None:
        if line.thread in self._named or line.where:  # gloo's own threads belong to its ops
            self._work(line, thread)

    def _carry(self, line: Line, thread: str) -> None:
        """Gloo does it beside this thread, from the call to the end of the wait for it."""
        op = f"gloo's op {self.pieces}"
        _join(self._clock(op), self._clock(thread))
        self._work(line, op)
        self._pending.setdefault(thread, []).append(op)

    def _carried(self, line: Line, thread: str) -> None:
        """A wait for gloo has ended, and with it all ops of this thread: it waits for one after the other."""
        for op in self._pending.pop(thread, []):
            _join(self._clock(thread), self._clock(op))

    def _allocate(self, line: Line, thread: str) -> None:
        known = _join(dict(self._clock(line.stream)), self._clock(thread))
        left = [touch for touch in self._freed.get(line.stream, []) if not touch.is_before(known)]
        self._freed[line.stream] = left
        self._memory[int(line.what)] = Memory(line.stream, before=list(left))

    def _lend(self, line: Line, thread: str) -> None:
        self._memory.setdefault(int(line.what), Memory()).lent_to.add(line.stream)

    def _free(self, line: Line, thread: str) -> None:
        memory = self._memory.pop(int(line.what), Memory())
        if memory.owner is not None:
            known = _join(dict(self._clock(memory.owner)), self._clock(thread))
            self._freed.setdefault(memory.owner, []).extend(
                touch
                for touch in memory.touches
                if not touch.is_before(known) and touch.by not in memory.lent_to
            )

    def _free_pinned(self, line: Line, thread: str) -> None:
        """torch lends pinned memory to every stream that copies it, by itself."""
        self._memory.pop(int(line.what), None)

    def _work(self, line: Line, by: str) -> None:
        self.pieces += 1
        clock = self._clock(by)
        clock[by] = clock.get(by, 0) + 1
        for is_write, begin, start, stop in line.touched:
            touch = Touch(by, clock[by], is_write, start, stop, line)
            memory = self._memory.setdefault(begin, Memory())
            both = [other for other in memory.touches if start < other.stop and other.start < stop]
            for other in both:
                if (is_write or other.is_write) and not other.is_before(clock):
                    self._report(f"{touch.describe()}, while {other.describe()}")
            for other in memory.before:
                if not other.is_before(clock):
                    self._report(f"{touch.describe()} in memory that was freed while {other.describe()}")
            memory.before = []
            memory.touches = [other for other in memory.touches if not _supersedes(touch, other, clock)]
            memory.touches.append(touch)

    def _report(self, race: str) -> None:
        self.races.append(race)


def _supersedes(touch: Touch, other: Touch, clock: Clock) -> bool:
    """Whoever comes after `touch` then also comes after the other, and needs not be compared with it."""
    covers = touch.start <= other.start and other.stop <= touch.stop
    return covers and other.is_before(clock) and (touch.is_write or not other.is_write)


def _join(clock: Clock, other: Clock) -> Clock:
    for name, time in other.items():
        if clock.get(name, 0) < time:
            clock[name] = time
    return clock


def _covers(clock: Clock, other: Clock) -> bool:
    return all(clock.get(name, 0) >= time for name, time in other.items())
