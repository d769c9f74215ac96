"""Calls that all ranks have to make (`flush()`, `save()`, `load()`, `verify()`): who is missing, and where.

`flush()` on one rank while another waits in a barrier of the user's would be silence until the time-out. So a
rank that has been in a call for a second leaves a note; each rank that has not come answers with the line of
the user's program that it is at, and both log it. It is no error by itself: the other rank may be slow.

`verify()` meets in the store alone, as ranks that disagree have no collective in common that is sure to fit.
A rank that goes on to its next exchange instead has missed the call, and neither can go on (`missed`). Notes:

    call              a rank has been in a call for long: which one, after how many programs of that rank
    meeting           the same, of one that meets in the store
    call/p, meeting/p how many ranks would say so of the call after p programs: the first one does
    absent/p          how many ranks have answered that they are elsewhere
    absent/p/first    the first of them, and where it is
    met/p, all/p      how many ranks, and that all of them, have come to a call that meets in the store
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from gradsieve.comm.store import Notes, parsed
from gradsieve.errors import printable

_log = logging.getLogger("gradsieve")

LONG = 1.0  # seconds in a call from which on it is worth a line in the log
MOMENT = 0.3  # seconds within which ranks usually come to the same call
OFTEN = 0.02  # seconds between two looks during that moment
_LARGEST = 1 << 60
_OTHERS = frozenset({"torch", "gradsieve", *sys.stdlib_module_names})
_PACKAGES = ("site-packages", "dist-packages")


@dataclass(frozen=True, slots=True)
class Call:
    """Of a user's, on one rank."""

    rank: int
    name: str
    step: int
    place: int  # programs that the rank had begun before: as many on all ranks that make the same call

    @property
    def words(self) -> str:
        return f"{self.name} after step {self.step}"

    @property
    def mend(self) -> str:
        return f"{self.name} waits for all ranks: call it on every rank, or on none"

    def text(self) -> str:
        return json.dumps([self.rank, self.name, self.step, self.place])

    @classmethod
    def read(cls, content: bytes, world: int) -> Call | None:
        """A peer's; None where it makes no sense."""
        match parsed(content):
            case [int(rank), str(name), int(step), int(place)] if (
                0 <= rank < world and 0 <= step < _LARGEST and 0 <= place < _LARGEST
            ):
                return cls(rank, printable(name.encode(errors="replace")), step, place)
        return None


@dataclass(slots=True)
class _Current:
    """The call that this rank is in."""

    call: Call
    meets: bool
    since: float
    is_counted: bool = False
    is_noted: bool = False
    is_logged: bool = False

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.since


class Calls:
    """This rank's calls, and its answers to others. All but `begin` and `end` runs on the watch's thread."""

    def __init__(self, notes: Notes, rank: int, world: int, begun: Callable[[], int]) -> None:
        self._notes, self.rank, self.world, self._begun = notes, rank, world, begun
        self._current: _Current | None = None
        self._met = -1  # place of the last call for which all ranks met
        self._answered = -1  # place of the last call of others that this rank has answered
        self._meeting: Call | None = None  # of another rank, which cannot end unless this one makes it, too

    def begin(self, name: str, step: int, meets: bool) -> None:
        """This rank makes a call; with `meets` it is to wait for `has_met`."""
        self._current = _Current(Call(self.rank, name, step, self._begun()), meets, time.monotonic())

    def end(self) -> None:
        self._current = None

    def has_met(self) -> bool:
        current = self._current
        return current is not None and self._met >= current.call.place

    @property
    def pause(self) -> float | None:
        """Seconds until the next look, where that is sooner than usual."""
        current = self._current
        is_young = current is not None and current.meets and current.seconds < MOMENT
        return OFTEN if is_young and not self.has_met() else None

    def look(self) -> None:
        """At this rank's own call; nothing is asked of the store where there is none, or a short one."""
        if (current := self._current) is None or self._met >= current.call.place:
            return
        place = current.call.place
        if current.meets and self._meet(current):
            return
        if current.seconds < LONG:
            return
        if not current.is_noted:
            current.is_noted = True
            kind = "meeting" if current.meets else "call"
            if self._notes.add(f"{kind}/{place}", 1) == 1:
                self._notes.put(kind, current.call.text())
                self._notes.announce()
        elif not current.is_logged and self._notes.has(f"absent/{place}/first"):
            current.is_logged = True
            self._log_missing(current)

    def _meet(self, current: _Current) -> bool:
        """Whether all ranks have come."""
        place, notes = current.call.place, self._notes
        if current.is_counted:
            has_met = notes.has(f"all/{place}")
        else:
            current.is_counted = True
            has_met = notes.add(f"met/{place}", 1) >= self.world
            if has_met:
                notes.put(f"all/{place}", "1")
        if has_met:
            self._met = place
        return has_met

    def _log_missing(self, current: _Current) -> None:
        call = current.call
        others = self._notes.add(f"absent/{call.place}", 0) - 1
        first = self._notes.words(f"absent/{call.place}/first")
        more = f"; and for {others} other ranks" if others > 0 else ""
        waited = f"{call.words} has waited {current.seconds:.1f} s for {first}{more}"
        _log.warning("rank %d: %s. %s", self.rank, waited, call.mend)

    def answer(self) -> None:
        """There is news: answer whoever waits for this rank in a call."""
        for kind in ("meeting", "call"):
            call = Call.read(self._notes.get(kind), self.world) if self._notes.has(kind) else None
            if call is None or call.rank == self.rank:
                continue
            if kind == "meeting":
                self._meeting = call
            if call.place > self._answered and not self._has_come_to(call):
                self._answered = call.place
                self._answer(call)

    def _answer(self, call: Call) -> None:
        here = where_the_program_is()
        if self._notes.add(f"absent/{call.place}", 1) == 1:
            self._notes.put(f"absent/{call.place}/first", f"rank {self.rank}, which is {here}")
        waited = f"rank {call.rank} has waited {LONG:.1f} s in {call.words} for this rank, which is {here}"
        _log.warning("rank %d: %s. %s", self.rank, waited, call.mend)

    def _has_come_to(self, call: Call) -> bool:
        """This rank makes the call, too, or is beyond it."""
        current = self._current
        return (
            self._begun() > call.place
            or self._met >= call.place
            or (current is not None and current.call.place == call.place)
            or is_program_in(call.name)
        )

    def missed(self) -> Call | None:
        """A call for which another rank waits in vain: this one has gone on to its next exchange instead."""
        call = self._meeting
        if call is None or self._met >= call.place or self._begun() <= call.place:
            return None
        return call


# -- where the user's program is --------------------------------------------------------------------------


def where_the_program_is() -> str:
    """`in barrier() at train.py:41`: torch's collective, if the program is in one, and the user's line."""
    frames = list(_frames())
    others = [frame for frame in frames if _module(frame).partition(".")[0] not in _OTHERS]
    own = [frame for frame in others if not any(name in frame.f_code.co_filename for name in _PACKAGES)]
    if not others:
        return "at an unknown place"
    here = (own or others)[0]
    place = f"at {Path(here.f_code.co_filename).name}:{here.f_lineno}"
    for frame in frames[: frames.index(here)]:  # torch may also have called the program, from further out
        name = frame.f_code.co_name
        if _module(frame).startswith("torch.distributed.") and name != "wrapper":  # torch's, around each
            return f"in {name}() {place}"
    return place


def is_program_in(call: str) -> bool:
    """Whether the main thread is inside of this call of ours, such as `flush()`."""
    frames = (frame for frame in _frames() if frame.f_code.co_name == call.removesuffix("()"))
    return any(_module(frame).startswith("gradsieve.") for frame in frames)


def _frames() -> Iterator[FrameType]:
    """Of the main thread, the innermost first."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))
