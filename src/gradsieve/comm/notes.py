"""Notes that ranks leave each other in the store of their rendezvous, under a prefix that only they know.

`Notes` are the keys; `Progress`, `Call` and `Verdict` are what stands in them. Peers wrote what is read:
lengths, types and ranges are checked, and what makes no sense is read as nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from gradsieve.errors import MismatchError, PeerError, list_ranks, printable

WORDS = 300  # characters of a peer's words, for a line of the log
_LONGEST = 65_536  # characters of a note
_LARGEST = 1 << 60

Connect = Callable[[float], Any]  # to a store, within so many seconds


class Notes:
    """Keys under one prefix of a store of torch's. All methods raise RuntimeError if the store is gone."""

    def __init__(self, store: Any, prefix: str) -> None:
        self._store, self._prefix = store, prefix
        self._connect: Connect | None = None
        self._read = 0  # entries of the news

    def move_to(self, connect: Connect | None, prefix: str, seconds: float = 30.0) -> None:
        """Use that prefix from now on, in a connection of its own if there is one to be had."""
        store = self._store if connect is None else connect(seconds)
        self._store, self._prefix, self._read, self._connect = store, prefix, 0, connect

    @property
    def can_reconnect(self) -> bool:
        return self._connect is not None

    def reconnect(self, seconds: float) -> None:
        """Connect again and read all news again: the server may be a new one, which knows of nothing."""
        self.move_to(self._connect, self._prefix, seconds)

    def has(self, name: str) -> bool:
        return self._store.check([self._key(name)])  # type: ignore[no-any-return]

    def get(self, name: str) -> bytes:
        return self._store.get(self._key(name))[:_LONGEST]  # type: ignore[no-any-return]

    def words(self, name: str) -> str:
        """Return a peer's words: nothing longer or stranger than a line of the log may be."""
        return printable(self.get(name)[:WORDS])

    def put(self, name: str, text: str) -> None:
        self._store.set(self._key(name), text[:_LONGEST])

    def add(self, name: str, amount: int) -> int:
        return self._store.add(self._key(name), amount)  # type: ignore[no-any-return]

    def wait(self, name: str, seconds: float) -> None:
        self._store.wait([self._key(name)], timedelta(seconds=seconds))

    def announce(self, text: str) -> None:
        """Add an entry to the news, unless another rank was first with the same one."""
        number = self._read
        while self._store.compare_set(self._key(f"news/{number}"), "", text).decode(errors="replace") != text:
            number += 1

    def news(self) -> Iterator[bytes]:
        """Yield the entries that were not read yet: one request if there are none."""
        while self.has(name := f"news/{self._read}"):
            self._read += 1
            yield self.get(name)

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}"


def parsed(content: bytes) -> Any:
    """Return what a peer wrote as JSON; None if it is none."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None


@dataclass(slots=True)
class Progress:
    """How far a rank has come. Its engine writes, its watch reads."""

    ops: int = 0  # begun so far: programs go in the same order everywhere, so that these can be compared
    waits: bool = False  # in the last of them
    what: str = "nothing"
    begun: int = 0  # programs; not sent

    def text(self) -> str:
        return json.dumps([self.ops, self.waits, self.what[:WORDS]])

    @classmethod
    def read(cls, content: bytes) -> Progress:
        match parsed(content):
            case [int(ops), bool(waits), str(what)] if 0 <= ops < _LARGEST:
                return cls(ops, waits, printable(what[:WORDS]))
        return cls()


@dataclass(frozen=True, slots=True)
class Call:
    """A user's call on one rank. With `meets` the rank waits in it for all ranks by the store alone."""

    rank: int
    name: str
    step: int
    place: int  # programs that the rank had begun before: as many on all ranks that make the same call
    meets: bool

    @property
    def words(self) -> str:
        return f"{self.name} after step {self.step}"

    @property
    def remedy(self) -> str:
        return f"{self.name} waits for all ranks: call it on every rank, or on none"

    def text(self) -> str:
        return json.dumps([self.rank, self.name, self.step, self.place, self.meets])

    @classmethod
    def read(cls, content: bytes, world: int) -> Call | None:
        match parsed(content):
            case [int(rank), str(name), int(step), int(place), bool(meets)] if (
                0 <= rank < world and 0 <= step < _LARGEST and 0 <= place < _LARGEST
            ):
                return cls(rank, printable(name[:WORDS]), step, place, meets)
        return None


_CAUSES = {
    "silent": "{who} died, or is stopped: no answer any more",
    "gave up": "{who} gave up: {what}",
    "left": "{who} left after {what}: its sync was closed or its program has ended. Where the others have "
    "more batches, give all ranks as many (drop_last=True)",
    "late": "{who} lives, but has not come to this exchange in time; its last was {what}. It is slow, waits "
    "for something else, or has no more batches: give all ranks as many (drop_last=True)",
    "alone": "{who} called {what}: call it on every rank, or on none. Where all ranks do call it, some had "
    "more batches than the others: give all ranks as many (drop_last=True)",
    "none": "all ranks live and wait: what is between them is broken, or a rank issued another collective",
    "store": "the store of the rendezvous does not answer, and no rank can be asked: the rank that has it "
    "({who}) died, or is stopped",
    "unknown": "a peer died, stalled beyond the group's time-out or issued another collective",
}
_REMEDY = (
    "Nothing of this step was kept, and the process group is unusable: start all ranks again, from the last "
    "checkpoint (sync.load())"
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The ranks to blame, the same on all ranks that read it; `what` the first of them last did or said."""

    kind: str = "unknown"
    ranks: tuple[int, ...] = ()
    what: str = ""

    def text(self) -> str:
        return json.dumps([self.kind, self.ranks, self.what[:WORDS]])

    @classmethod
    def read(cls, content: bytes, world: int) -> Verdict:
        match parsed(content):
            case [str(kind), [*ranks], str(what)] if kind in _CAUSES and all(
                type(rank) is int and 0 <= rank < world for rank in ranks
            ):
                return cls(kind, tuple(ranks), printable(what[:WORDS]))
        return cls()

    def cause(self, rank: int) -> str:
        """Return the cause in words, for the error of `rank`."""
        this_one = " (this one)" if rank in self.ranks else ""
        who = f"{list_ranks(self.ranks)}{this_one}" if self.ranks else "none of these ranks"
        return _CAUSES[self.kind].format(who=who, what=self.what or "nothing")

    def error(self, rank: int, failed: str, by_backend: str = "") -> PeerError | MismatchError:
        """Return the error for `rank`, on which something `failed`; `by_backend` is the backend's message."""
        if self.kind == "alone":
            return MismatchError(f"rank {rank}: {self.cause(rank)}. {_REMEDY}")
        more = f"; the backend says: {by_backend}" if by_backend else ""
        return PeerError(f"{self.cause(rank)}. On rank {rank} {failed}{more}. {_REMEDY}", self.ranks)
