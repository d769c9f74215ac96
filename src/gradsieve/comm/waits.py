"""Which rank is missing in a call that all ranks have to make, and where it is instead.

`flush()` on one rank while another waits in a barrier of the user's is silence until the time-out. So a rank
that waits in a call puts a note into the store, once; ranks that have not come answer where their program is,
once; and both say it in the log. It is never an error: the other rank may be slow. Keys:

    news/n            there is something new on one of the boards: whoever looks reads one key, until it is
    waits             a rank has waited for long: which call, and how many programs it had begun before
    waits/p           somebody has said so of the call after p programs
    absent/p          how many ranks have answered that they are elsewhere
    absent/p/first    the first of them, and where it is
    met/p, all/p      how many ranks, and that all of them, make a call that no exchange begins with
    alone             a rank makes such a call, and has waited for a moment

That is how `verify()` finds out that a rank trains on: a collective could not, as what it is for are ranks
that disagree about their next one.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

from gradsieve.comm import whereabouts
from gradsieve.errors import printable

_log = logging.getLogger("gradsieve")

LONG = 1.0
"""Seconds in a call from which on they are worth a line in the log."""
MOMENT = 0.3
"""Seconds for ranks that make the same call to come to it."""
OFTEN = 0.02
"""Seconds between two looks during that moment."""
_TEXT = 300
_MOST_PLACE = 1 << 60


class Store(Protocol):
    """As much of torch's store as is needed."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def add(self, key: str, amount: int, /) -> int: ...

    def check(self, keys: list[str], /) -> bool: ...

    def wait(self, keys: list[str], timeout: timedelta, /) -> None: ...


class Keys:
    """A store's, under a prefix, with news of what was put there."""

    def __init__(self, store: Store, prefix: str) -> None:
        self._store, self._prefix = store, prefix
        self._heard = 0
        self._connect: Callable[[float], Store] | None = None

    def move_to(self, connect: Callable[[float], Store] | None, prefix: str, seconds: float = 30.0) -> None:
        """From now on under that prefix; in a store of its own, if `connect` gives one within so many
        seconds, which can then be asked for again."""
        store = self._store if connect is None else connect(seconds)
        self._store, self._prefix, self._heard, self._connect = store, prefix, 0, connect

    @property
    def can_reconnect(self) -> bool:
        return self._connect is not None

    def reconnect(self, seconds: float) -> None:
        """The server may be a new one, which knows of nothing: what was heard of is heard again."""
        self.move_to(self._connect, self._prefix, seconds)

    def has(self, name: str) -> bool:
        return self._store.check([self._key(name)])

    def get(self, name: str) -> bytes:
        return self._store.get(self._key(name))

    def put(self, name: str, text: str, longest: int = _TEXT) -> None:
        self._store.set(self._key(name), text[:longest])

    def add(self, name: str, amount: int) -> int:
        return self._store.add(self._key(name), amount)

    def wait(self, name: str, seconds: float) -> None:
        self._store.wait([self._key(name)], timedelta(seconds=seconds))

    def hear(self) -> bool:
        """Whether there is news since it was last asked: one request where there is none."""
        before = self._heard
        while self.has(f"news/{self._heard}"):
            self._heard += 1
        return self._heard > before

    def tell(self) -> None:
        """Say that there is news. Two keys: another rank may do so at the same time, and be heard first."""
        number = self._heard
        while self.has(f"news/{number}"):
            number += 1
        for each in (number, number + 1):
            self.put(f"news/{each}", "1")

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}"


@dataclass(frozen=True, slots=True)
class Call:
    """Of a user's, on one rank."""

    rank: int
    name: str
    step: int
    place: int
    """Programs that the rank had begun before: the same number on all ranks that make the same call."""

    @property
    def words(self) -> str:
        return f"{self.name} after step {self.step}"

    def text(self) -> str:
        return json.dumps([self.rank, self.name, self.step, self.place])

    @classmethod
    def read(cls, content: bytes, world: int) -> Call | None:
        """A peer's; None where it makes no sense."""
        try:
            match json.loads(content[:_TEXT]):
                case [int(rank), str(name), int(step), int(place)] if (
                    0 <= rank < world and 0 <= step < _MOST_PLACE and 0 <= place < _MOST_PLACE
                ):
                    return cls(rank, printable(name.encode(errors="replace")), step, place)
        except (ValueError, RecursionError):
            pass
        return None


class Waits:
    """One rank's calls, and its answers to the others'. All but `begin` and `end` is for the thread that has
    the store."""

    def __init__(self, keys: Keys, rank: int, world: int, begun: Callable[[], int]) -> None:
        self._keys, self.rank, self.world, self._begun = keys, rank, world, begun
        self._call: Call | None = None
        self._since = 0.0
        self._assembles = False
        self._is_counted = self._is_alone_sent = self._is_sent = self._is_answered = False
        self._met = -1
        """Place of the last call for which all ranks assembled."""
        self._alone: Call | None = None
        """Of another rank, which cannot end unless this one makes it, too."""

    def begin(self, name: str, step: int, assembles: bool) -> None:
        """This rank makes a call. With `assembles` it goes on when all ranks make it: see `has_met`."""
        self._is_counted = self._is_alone_sent = self._is_sent = self._is_answered = False
        self._since, self._assembles = time.monotonic(), assembles
        self._call = Call(self.rank, name, step, self._begun())

    def end(self) -> None:
        self._call = None

    def has_met(self) -> bool:
        call = self._call
        return call is not None and self._met >= call.place

    @property
    def pause(self) -> float | None:
        """Seconds until the next look, where that is sooner than usual."""
        young = time.monotonic() - self._since < MOMENT
        return OFTEN if self._call is not None and self._assembles and not self.has_met() and young else None

    def look(self) -> None:
        """At this rank's own call; nothing is asked of the store where there is none, or a short one."""
        call, seconds = self._call, time.monotonic() - self._since
        if call is None:
            return
        if self._assembles and not self.has_met():
            self._assemble(call, seconds)
        if self.has_met() or seconds < LONG:
            return
        if not self._is_sent:
            self._is_sent = True
            if not self._keys.has(f"waits/{call.place}"):
                self._keys.put(f"waits/{call.place}", "1")
                self._keys.put("waits", call.text())
                self._keys.tell()
        elif not self._is_answered and self._keys.has(f"absent/{call.place}/first"):
            self._is_answered = True
            self._say_who_is_missing(call, seconds)

    def _assemble(self, call: Call, seconds: float) -> None:
        if not self._is_counted:
            self._is_counted = True
            if self._keys.add(f"met/{call.place}", 1) >= self.world:
                self._keys.put(f"all/{call.place}", "1")
                self._met = call.place
        elif self._keys.has(f"all/{call.place}"):
            self._met = call.place
        elif seconds > MOMENT and not self._is_alone_sent:
            self._is_alone_sent = True
            self._keys.put("alone", call.text())
            self._keys.tell()

    def _say_who_is_missing(self, call: Call, seconds: float) -> None:
        first = printable(self._keys.get(f"absent/{call.place}/first")[:_TEXT])
        others = self._keys.add(f"absent/{call.place}", 0) - 1
        more = f"; and for {others} other ranks" if others > 0 else ""
        _log.warning(
            "rank %d: %s has waited %.1f s for %s%s. %s waits for all ranks: call it on every rank, or on "
            "none",
            self.rank,
            call.words,
            seconds,
            first,
            more,
            call.name,
        )

    def hear(self) -> None:
        """There is news: answer whoever waits for this rank."""
        if self._keys.has("alone"):
            self._alone = Call.read(self._keys.get("alone"), self.world)
        if not self._keys.has("waits"):
            return
        theirs = Call.read(self._keys.get("waits"), self.world)
        if theirs is None or theirs.rank == self.rank or self._has_come_to(theirs):
            return
        here = whereabouts.of_main_thread()
        if self._keys.add(f"absent/{theirs.place}", 1) == 1:
            self._keys.put(f"absent/{theirs.place}/first", f"rank {self.rank}, which is {here}")
        _log.warning(
            "rank %d: rank %d has waited %.1f s in %s for this rank, which is %s. %s waits for all ranks: "
            "call it on every rank, or on none",
            self.rank,
            theirs.rank,
            LONG,
            theirs.words,
            here,
            theirs.name,
        )

    def _has_come_to(self, theirs: Call) -> bool:
        """This rank makes the call, too, or is beyond it."""
        mine = self._call
        return (
            self._begun() > theirs.place
            or self._met >= theirs.place
            or (mine is not None and mine.place == theirs.place)
            or whereabouts.is_main_thread_in(theirs.name)
        )

    def deserted(self) -> Call | None:
        """A call for which another rank waits in vain: this one has gone on to its next exchange instead."""
        theirs = self._alone
        if theirs is None or self._met >= theirs.place or self._begun() <= theirs.place:
            return None
        return theirs
