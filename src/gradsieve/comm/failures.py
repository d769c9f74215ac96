"""Who failed: ranks find it out together, through the store of their rendezvous.

A collective's own error names no rank, or one that only failed as a consequence. So a thread of each rank
looks now and then whether somebody asks; nothing of it is in the way of a step. The same thread reports calls
for which a rank is missing (`calls.py`). Notes, under a prefix that the ranks agree on at attach:

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

from gradsieve.comm.calls import Call, Calls
from gradsieve.comm.store import TEXT, Connect, Notes, Store, parsed
from gradsieve.errors import MismatchError, PeerError, list_ranks, printable

_log = logging.getLogger("gradsieve")

POLL_SECONDS = 0.2  # between two looks: five requests a second and rank, 5,000 for the store of 1,024 ranks
HURRY_SECONDS = 0.7  # for answers, after a wait that was as long as its deadline: three looks
PATIENCE_SECONDS = 1.5  # for answers, after a sudden end: the machine may be busy, and there is time
RECONNECT_SECONDS = 0.8  # for one attempt to reach a store that is gone: `close` waits for it
LONGEST_PAUSE = 10.0  # seconds between two of these; the first ones come sooner
_HOST_LEFT = "end"
_LONGEST = 65_536  # characters of a verdict


@dataclass(slots=True)
class Progress:
    """How far a rank has come. Its engine writes, its watch reads."""

    ops: int = 0  # begun so far: programs go in the same order everywhere, so that these can be compared
    waits: bool = False  # in the last of them
    what: str = "nothing"
    begun: int = 0  # programs; not sent

    def text(self) -> str:
        return f"{self.ops} {int(self.waits)} {self.what}"[:TEXT]

    @classmethod
    def read(cls, content: bytes) -> Progress:
        """A peer's; what makes no sense counts as an answer of a rank that is nowhere."""
        ops, _, rest = printable(content[:TEXT]).partition(" ")
        waits, _, what = rest.partition(" ")
        return cls(int(ops) if ops.isascii() and ops.isdigit() and len(ops) < 20 else 0, waits == "1", what)


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
    "store": "the store of the rendezvous does not answer, so that nobody can be asked: who has it "
    "({who}) died, or is stopped",
    "unknown": "a peer died, stalled beyond the group's time-out or issued another collective",
}
_USELESS = (
    "Nothing of this step was kept, and the group is of no more use: start all ranks again, from the last "
    "checkpoint (sync.load())"
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Who is to blame, the same on all ranks that read it; `what` the first of them said, or last did."""

    kind: str = "unknown"
    ranks: tuple[int, ...] = ()
    what: str = ""

    def text(self) -> str:
        return json.dumps([self.kind, list(self.ranks), self.what[:TEXT]])

    @classmethod
    def read(cls, content: bytes, world: int) -> Verdict:
        match parsed(content, _LONGEST):
            case [str(kind), [*ranks], str(what)] if kind in _CAUSES and all(
                type(rank) is int and 0 <= rank < world for rank in ranks
            ):
                return cls(kind, tuple(ranks), printable(what.encode(errors="replace")[:TEXT]))
        return cls()

    def cause(self, rank: int) -> str:
        """In words, for the error of `rank`."""
        this_one = " (this one)" if rank in self.ranks else ""
        who = f"{list_ranks(self.ranks)}{this_one}" if self.ranks else "none of these ranks"
        return _CAUSES[self.kind].format(who=who, what=self.what or "nothing")

    def error(self, rank: int, failed: str, said: str = "") -> PeerError | MismatchError:
        """On `rank`, where something `failed`; `said` is the backend's own message."""
        if self.kind == "alone":
            return MismatchError(f"rank {rank}: {self.cause(rank)}. {_USELESS}")
        by_backend = f"; the backend says: {said}" if said else ""
        return PeerError(f"{self.cause(rank)}. On rank {rank} {failed}{by_backend}. {_USELESS}", self.ranks)


class Watch:
    """Answers for one rank, and asks for it, on a thread that alone uses the store."""

    def __init__(
        self,
        store: Store,
        prefix: str,
        rank: int,
        world: int,
        progress: Progress,
        fail: Callable[[], None],
        hosts_store: bool = False,
    ) -> None:
        """`fail` is called, once, when there is a verdict."""
        self._notes, self.rank, self.world = Notes(store, prefix), rank, world
        self._progress, self._fail, self._hosts_store = progress, fail, hosts_store
        self.calls = Calls(self._notes, rank, world, lambda: progress.begun)
        self.host: tuple[int, ...] = ()  # the rank whose process has the store, if it is one of them
        if hosts_store:
            self._notes.put("host", str(rank))
        self._gave_up: str | None = None
        self._seconds: float | None = None  # for answers, once this rank asks
        self._gone = 0
        self._closed = False
        self.verdict: Verdict | None = None
        # Why nothing more may be issued here. A rank that gave up knows it before its thread tells anybody:
        # its next op would be taken for the one in which the others wait.
        self.refusal: Verdict | None = None
        self.without_store: Verdict | None = None  # on whatever fails from now on, without asking
        self._wake = threading.Event()
        self._reached = threading.Event()  # the store has answered since this rank asked
        self._decided = threading.Event()
        self._deciding = threading.Lock()  # the watch and a thread that asks may both come to a verdict
        self._thread = threading.Thread(target=self._run, name="gradsieve-watch", daemon=True)
        self._thread.start()

    def ask(self, seconds: float, gone: int = 0) -> Verdict:
        """After a failure: who is to blame. So many ranks are known not to answer. Returns soon after the
        time for answers also where the store gives none."""
        self._seconds, self._gone = seconds, gone
        self._wake.set()
        if self.without_store is None and not self._decided.wait(seconds + 0.2) and self._reached.is_set():
            self._decided.wait(PATIENCE_SECONDS)
        return self._decide(self.without_store or Verdict("store", self.host), publish=False)

    def learn_host(self) -> None:
        """Once all ranks have had time to say it."""
        if self._notes.has("host"):
            number = self._notes.words("host")
            if number.isascii() and number.isdigit() and len(number) < 8 and int(number) < self.world:
                self.host = (int(number),)

    def move_to(self, connect: Connect | None, prefix: str) -> None:
        """All ranks do: their notes are under this prefix from now on, which nobody else knows."""
        self._notes.move_to(connect, prefix)

    def give_up(self, why: str) -> None:
        """This rank cannot go on, for a reason of its own: the others need not wait for it."""
        self._gave_up = why
        self.refusal = Verdict("gave up", (self.rank,), why[:TEXT])
        self._seconds = 0.0
        self._wake.set()

    def look_now(self) -> None:
        """A call has begun that waits for what is in the store."""
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
                self._decide(self.without_store, publish=False)
            if not self._reconnect():
                return

    def _attend(self) -> None:
        """Until this rank or another one fails, or leaves with the store."""
        missed = self._listen()
        if missed is not None:
            words = f"{missed.words} while rank {self.rank} went on training ({self._progress.what})"
            self._diagnose(Verdict("alone", (missed.rank,), words))
        elif self._closed and self._gave_up is None:
            self._leave()
        elif not self._is_needed and self._notes.words("asked") == _HOST_LEFT:
            what = self._notes.words(f"left/{self.host[0]}") if self.host else ""
            self.without_store = Verdict("left", self.host, what)
        else:
            self._diagnose()

    @property
    def _is_needed(self) -> bool:
        """By this rank itself."""
        return self._closed or self._seconds is not None

    def _listen(self) -> Call | None:
        """Until somebody asks, here or elsewhere, or this rank has missed a call that another one is in."""
        while True:
            self._wake.wait(self.calls.pause or POLL_SECONDS)
            self._wake.clear()
            if self._is_needed:
                return None
            self.calls.look()
            if self._notes.has_news():
                if self._notes.has("asked"):
                    return None
                self.calls.answer()
            if (missed := self.calls.missed()) is not None:
                return missed

    def _reconnect(self) -> bool:
        """Until the store answers again. False where this rank needs it before: it has to do without."""
        if not self._notes.can_reconnect:
            return False
        began, pause = time.monotonic(), 0.0
        while not self._is_needed:
            try:
                self._notes.reconnect(RECONNECT_SECONDS)
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

    def _leave(self) -> None:
        if self.verdict is not None or self.without_store is not None:
            return
        self._notes.put(f"left/{self.rank}", self._progress.what)
        leavers = self._notes.add("leavers", 1)
        if not self._hosts_store:
            return
        self._notes.put("asked", _HOST_LEFT)
        self._notes.announce()
        deadline = time.monotonic() + 1.5 * POLL_SECONDS  # by then all have looked
        while leavers < self.world and time.monotonic() < deadline:
            time.sleep(0.01)
            leavers = self._notes.add("leavers", 0)

    def _diagnose(self, found: Verdict | None = None) -> None:
        """With the other ranks: answer, and come to a verdict or read it. This rank may have `found` one."""
        notes = self._notes
        if self._gave_up is not None:
            notes.put(f"gave_up/{self.rank}", self._gave_up)
        leads = notes.add("leaders", 1) == 1
        notes.put("asked", str(self.rank))
        if self._is_needed or found is not None:  # otherwise another rank has said so
            notes.announce()
        self._reached.set()
        notes.put(f"answer/{self.rank}", self._progress.text())
        notes.add("answers", 1)
        if leads:
            self._decide(found or self._examine(HURRY_SECONDS if self._seconds is None else self._seconds))
            return
        try:
            notes.wait("verdict", PATIENCE_SECONDS + 0.3)
            verdict = Verdict.read(notes.get("verdict"), self.world)
        except RuntimeError:  # it was the leader that died
            self._decide(self._examine(0.0))
        else:
            self._decide(verdict, publish=False)

    def _examine(self, seconds: float) -> Verdict:
        """Once a failure and group, by one rank: a few requests for each of the others."""
        notes, expected = self._notes, self.world - self._gone
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and notes.add("answers", 0) < expected:
            time.sleep(0.02)
        found: dict[str, list[int]] = {"gave_up": [], "answer": [], "left": [], "silent": []}
        for rank in range(self.world):
            given = (note for note in found if notes.has(f"{note}/{rank}"))
            found[next(given, "silent")].append(rank)
        for kind in ("gave_up", "silent", "left"):
            if ranks := found[kind]:
                what = "" if kind == "silent" else notes.words(f"{kind}/{ranks[0]}")
                return Verdict(kind.replace("_", " "), tuple(ranks), what)
        answers = {rank: Progress.read(notes.get(f"answer/{rank}")) for rank in found["answer"]}
        farthest = max(progress.ops for progress in answers.values())
        late = [r for r, progress in answers.items() if progress.ops < farthest and not progress.waits]
        return Verdict("late", tuple(late), answers[late[0]].what) if late else Verdict("none")

    def _decide(self, verdict: Verdict, publish: bool = True) -> Verdict:
        """The first verdict holds."""
        with self._deciding:
            if self.verdict is not None:
                return self.verdict
            self.verdict = self.refusal = verdict
        self._decided.set()
        if publish:
            self._notes.put("verdict", verdict.text(), _LONGEST)
        self._fail()
        return verdict
