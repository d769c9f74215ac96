"""Whom to blame when an exchange fails: ranks ask each other, by way of the store of their rendezvous.

A collective's own error names no rank, or one that only failed as a consequence. So a thread of each rank
looks now and then whether somebody asks; nothing of it is in the way of a step. The same thread reports calls
that wait (`waits.py`). Keys, under a prefix that the ranks agree on at attach and nobody else knows:

    asked       an op failed somewhere: who lives?
    answer/r    rank r does: how many ops it has begun, whether it waits in one, and for what
    answers     how many have answered
    gave_up/r   rank r failed by itself, and how
    left/r      rank r closed its engine, and after what
    host        the rank whose process has the store, if there is one
    leavers     how many have left; when the host has, `asked` says so: its process may end, and the store
    leaders     the first to count here is the leader: it reads all answers, the only thing linear in P
    verdict     what the leader found, for the others

What is read was written by peers: lengths, types and ranges are checked.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from gradsieve.comm.waits import Call, Keys, Store, Waits
from gradsieve.errors import list_ranks, printable

_log = logging.getLogger("gradsieve")

POLL_SECONDS = 0.2
"""Between two looks: five requests a second and rank, 5,000 for the store of 1,024 ranks."""
HURRY_SECONDS = 0.7
"""For answers, after a wait that was as long as its deadline: three looks."""
PATIENCE_SECONDS = 1.5
"""For answers, after a sudden end: the machine may be busy, and there is time."""
RECONNECT_SECONDS = 0.8
"""For an attempt to reach a store that is gone: less than `close` waits for this thread."""
LONGEST_PAUSE = 10.0
"""Seconds between two of these; the first ones come sooner."""
_END = b"end"
_LONGEST = 65_536
_TEXT = 300


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a rank has come."""

    ops: int
    """Begun so far: programs go in the same order everywhere, so that these can be compared."""
    waits: bool
    what: str
    begun: int = 0
    """Programs; this number is not sent."""

    def text(self) -> str:
        return f"{self.ops} {int(self.waits)} {self.what}"[:_TEXT]

    @classmethod
    def read(cls, content: bytes) -> Progress:
        """A peer's; what makes no sense counts as an answer of a rank that is nowhere."""
        ops, _, rest = printable(content[:_TEXT]).partition(" ")
        waits, _, what = rest.partition(" ")
        return cls(int(ops) if ops.isascii() and ops.isdigit() and len(ops) < 20 else 0, waits == "1", what)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Who is to blame; the same on all ranks that heard of it."""

    kind: str = "unknown"
    ranks: tuple[int, ...] = ()
    what: str = ""
    """Of the first of them: what it said, or last did."""

    def text(self) -> str:
        return json.dumps([self.kind, list(self.ranks), self.what[:_TEXT]])

    @classmethod
    def read(cls, content: bytes, world: int) -> Verdict:
        try:
            match json.loads(content[:_LONGEST]):
                case [str(kind), [*ranks], str(what)] if kind in _WORDS and all(
                    type(rank) is int and 0 <= rank < world for rank in ranks
                ):
                    return cls(kind, tuple(ranks), printable(what.encode(errors="replace")[:_TEXT]))
        except (ValueError, RecursionError):
            pass
        return cls()

    def words(self, rank: int) -> str:
        """For the error of `rank`."""
        who = (
            f"{list_ranks(self.ranks)}{' (this one)' if rank in self.ranks else ''}"
            if self.ranks
            else "none of these ranks"
        )
        return _WORDS[self.kind].format(who=who, what=self.what or "nothing")


_WORDS = {
    "silent": "{who} died, or is stopped: no answer any more",
    "gave up": "{who} gave up: {what}",
    "left": "{who} left after {what}: its sync was closed or its program has ended. Where the others have "
    "more batches, give all ranks as many (drop_last=True)",
    "late": "{who} lives, but has not come to this exchange in time; its last was {what}. It is slow, waits "
    "for something else, or has no more batches: give all ranks as many (drop_last=True)",
    "alone": "{who} called {what}: call it on every rank, or on none. Where all ranks do call it, some had "
    "more batches than the others: give all ranks as many (drop_last=True)",
    "none": "all ranks live and wait: what is between them is broken, or a rank issued another collective",
    "store": "the store of the rendezvous does not answer, so that nobody can be asked: who has it "
    "({who}) died, or is stopped",
    "unknown": "a peer died, stalled beyond the group's time-out or issued another collective",
}


class Monitor:
    """Answers for one rank, and asks for it."""

    def __init__(
        self,
        store: Store,
        prefix: str,
        rank: int,
        world: int,
        progress: Callable[[], Progress],
        fail: Callable[[], None],
        hosts_store: bool = False,
    ) -> None:
        """`store` is used by the watch alone; `fail` is called, once, when there is a verdict."""
        self._keys, self.rank, self.world = Keys(store, prefix), rank, world
        self._progress, self._fail = progress, fail
        self.waits = Waits(self._keys, rank, world, lambda: progress().begun)
        self.host: tuple[int, ...] = ()
        """The rank whose process has the store, if it is one of them."""
        self._hosts_store = hosts_store
        if hosts_store:
            self._keys.put("host", str(rank))
        self._gave_up: str | None = None
        self._seconds: float | None = None
        """For answers, if this rank asks."""
        self._gone = 0
        self._closed = False
        self.without_store: Verdict | None = None
        """On whatever fails from now on, without asking."""
        self._wake = threading.Event()
        self._reached = threading.Event()
        """The store answers."""
        self._decided = threading.Event()
        self._deciding = threading.Lock()
        """The thread of the watch and the one that asks may both come to a verdict: the first one holds."""
        self.verdict: Verdict | None = None
        self._thread = threading.Thread(target=self._run, name="gradsieve-watch", daemon=True)
        self._thread.start()

    def ask(self, seconds: float, gone: int = 0) -> Verdict:
        """After a failure: who is to blame. So many ranks are known not to answer. Comes back soon after the
        time for answers also where the store gives none."""
        self._seconds, self._gone = seconds, gone
        self._wake.set()
        if self.without_store is None and not self._decided.wait(seconds + 0.2) and self._reached.is_set():
            self._decided.wait(PATIENCE_SECONDS)
        self._evaluate_by(self.without_store or Verdict("store", self.host), tell=False)
        assert self.verdict is not None
        return self.verdict

    def learn_host(self) -> None:
        """Once all ranks have had time to say it."""
        if self._has("host"):
            number = printable(self._get("host")[:_TEXT])
            if number.isascii() and number.isdigit() and len(number) < 8 and int(number) < self.world:
                self.host = (int(number),)

    def move_to(self, connect: Callable[[float], Store] | None, prefix: str) -> None:
        """All ranks do: what they say from now on is under this prefix, which nobody else knows."""
        self._keys.move_to(connect, prefix)

    def give_up(self, why: str) -> None:
        """This rank cannot go on, for a reason of its own: the others need not wait for it."""
        self._gave_up = why
        self._seconds = 0.0
        self._wake.set()

    def close(self) -> None:
        """Leave a note, and end."""
        self._closed = True
        self._wake.set()
        # A store that goes while the thread connects to it holds that up three times as long as it was given.
        self._thread.join(timeout=3 * RECONNECT_SECONDS + 1.0)

    # -- the thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            try:
                self._attend()
                return
            except RuntimeError:  # the store is gone, which harms nobody who need not ask
                self.without_store = Verdict("store", self.host)
            if not self._closed and self._seconds is not None:
                self._evaluate_by(self.without_store, tell=False)
            if not self._reconnect():
                return

    def _attend(self) -> None:
        deserted = self._listen()
        if deserted is not None:
            self._desert(deserted)
        elif self._closed and self._gave_up is None:
            self._leave()
        elif not self._is_needed and self._get("asked") == _END:
            what = printable(self._get(f"left/{self.host[0]}")[:_TEXT]) if self.host else ""
            self.without_store = Verdict("left", self.host, what)
        else:
            self._hold()

    def _reconnect(self) -> bool:
        """Until the store answers again. False where this rank needs it before: it has to do without."""
        if not self._keys.can_reconnect:
            return False
        began, pause = time.monotonic(), 0.0
        while not self._is_needed:
            try:
                self._keys.reconnect(RECONNECT_SECONDS)
            except RuntimeError:
                if not pause:
                    _log.warning(
                        "rank %d: the store of the rendezvous does not answer. Training goes on; until "
                        "the store is back nobody can say which rank failed",
                        self.rank,
                    )
                pause = min(LONGEST_PAUSE, 2 * pause or POLL_SECONDS)
                self._wake.wait(pause)
            else:
                away = time.monotonic() - began
                _log.warning(
                    "rank %d: the connection to the store was lost, and is back after %.1f s", self.rank, away
                )
                self.without_store = None
                return True
        return False

    @property
    def _is_needed(self) -> bool:
        """By this rank itself."""
        return self._closed or self._seconds is not None

    def _listen(self) -> Call | None:
        """Until somebody asks, here or elsewhere, or this rank has left another one alone in a call."""
        while True:
            self._wake.wait(self.waits.pause or POLL_SECONDS)
            self._wake.clear()
            if self._is_needed:
                return None
            self.waits.look()
            if self._keys.hear():
                if self._has("asked"):
                    return None
                self.waits.hear()
            if (call := self.waits.deserted()) is not None:
                return call

    def look_now(self) -> None:
        """A call has begun that waits for what is in the store."""
        self._wake.set()

    def _desert(self, call: Call) -> None:
        """Neither can go on: that one waits for this rank's call, this one for its part in an exchange."""
        what = f"{call.words} while rank {self.rank} went on training ({self._progress().what})"
        if self._keys.add("leaders", 1) > 1:  # somebody else has found out, or looks into another failure
            self._answer()
            self._hear_verdict()
            return
        self._keys.put("asked", str(self.rank))
        self._keys.tell()
        self._reached.set()
        self._evaluate_by(Verdict("alone", (call.rank,), what))

    def _leave(self) -> None:
        if self.verdict is not None or self.without_store is not None:
            return
        self._keys.put(f"left/{self.rank}", self._progress().what)
        leavers = self._keys.add("leavers", 1)
        if not self._hosts_store:
            return
        self._keys.put("asked", _END.decode())
        self._keys.tell()
        deadline = time.monotonic() + 1.5 * POLL_SECONDS  # by then all have looked
        while leavers < self.world and time.monotonic() < deadline:
            time.sleep(0.01)
            leavers = self._keys.add("leavers", 0)

    def _hold(self) -> None:
        seconds = HURRY_SECONDS if self._seconds is None else self._seconds
        if self._gave_up is not None:
            self._keys.put(f"gave_up/{self.rank}", self._gave_up)
        self._keys.put("asked", str(self.rank))
        if self._is_needed:  # otherwise it was heard of
            self._keys.tell()
        self._reached.set()
        self._answer()
        if self._keys.add("leaders", 1) == 1:
            self._evaluate_by(self._examine(seconds))
        else:
            self._hear_verdict()

    def _answer(self) -> None:
        self._keys.put(f"answer/{self.rank}", self._progress().text())
        self._keys.add("answers", 1)

    def _hear_verdict(self) -> None:
        try:
            self._keys.wait("verdict", PATIENCE_SECONDS + 0.3)
            content = self._get("verdict")
        except RuntimeError:  # it was the leader that died
            self._evaluate_by(self._examine(0.0))
        else:
            self._evaluate_by(Verdict.read(content, self.world), tell=False)

    def _examine(self, seconds: float) -> Verdict:
        """Once a failure and group, by one rank: a few requests for each of the others."""
        deadline, expected = time.monotonic() + seconds, self.world - self._gone
        while time.monotonic() < deadline and self._keys.add("answers", 0) < expected:
            time.sleep(0.02)
        found: dict[str, list[int]] = {"gave_up": [], "answer": [], "left": [], "silent": []}
        for rank in range(self.world):
            notes = (note for note in found if self._has(f"{note}/{rank}"))
            found[next(notes, "silent")].append(rank)
        for kind in ("gave_up", "silent", "left"):
            if ranks := found[kind]:
                what = "" if kind == "silent" else printable(self._get(f"{kind}/{ranks[0]}")[:_TEXT])
                return Verdict(kind.replace("_", " "), tuple(ranks), what)
        answers = {rank: Progress.read(self._get(f"answer/{rank}")) for rank in found["answer"]}
        farthest = max(progress.ops for progress in answers.values())
        late = [r for r, progress in answers.items() if progress.ops < farthest and not progress.waits]
        return Verdict("late", tuple(late), answers[late[0]].what) if late else Verdict("none")

    def _evaluate_by(self, verdict: Verdict, tell: bool = True) -> None:
        with self._deciding:
            if self.verdict is not None:
                return
            self.verdict = verdict
        self._decided.set()
        if tell:
            self._keys.put("verdict", verdict.text(), _LONGEST)
        self._fail()

    def _has(self, name: str) -> bool:
        return self._keys.has(name)

    def _get(self, name: str) -> bytes:
        return self._keys.get(name)
