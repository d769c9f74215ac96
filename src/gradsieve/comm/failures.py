"""Ranks find out together who failed, and who is missing in a call, through the store of their rendezvous.

A collective's own error names no rank, or one that only failed as a consequence. So a thread of each rank
looks now and then whether there is news in the store; no step waits for it. After a failure all ranks answer,
and one of them comes to a verdict. Calls that all ranks have to make (`flush()`, `save()`, `load()`,
`verify()`) report in the same news: on one rank, while another waits in a barrier of the user's, they would
be silence until the time-out. So a rank that has been in a call for a second says so; each rank that has not
come answers with the line of the user's program that it is at, and both log it. This is no error: the other
rank may be slow. `verify()` meets in the store alone, because ranks that disagree have no collective in
common; a rank that goes on to its next exchange instead has missed it, and neither can go on. Notes:

    news/n            "asked" (an op failed somewhere), "end" (the process with the store ends), or a `Call`
    answer/r          `Progress` of rank r, which lives
    answers           number of ranks that answered
    gave up/r         why rank r failed by itself
    left/r            rank r closed its engine after this
    host              the rank whose process has the store, if there is one
    leavers           number of ranks that left
    leaders           the first rank to count here reads all answers: the only work that is linear in P
    verdict           what the leader found, for the others
    long/k/p          number of ranks long in a call of kind k after p programs: the first one is in the news
    absent/p          number of ranks that answered that they are elsewhere
    absent/p/first    the first of them, and where it is
    met/p, all/p      number of ranks that have come to a call that meets, and that all of them have
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from gradsieve.comm.notes import WORDS, Call, Connect, Notes, Progress, Verdict, parsed

_log = logging.getLogger("gradsieve")

POLL_SECONDS = 0.2  # between two looks: five requests a second and rank, 5,000 for the store of 1,024 ranks
FAST_POLL_SECONDS = 0.02  # the same while ranks usually come to a call that meets
MEETING_SECONDS = 0.3  # for which a call that meets polls fast
LONG_CALL_SECONDS = 1.0  # in a call from which on it is worth a line in the log
ANSWER_SECONDS_LATE = 0.7  # for answers, after a wait that was as long as its deadline: three looks
ANSWER_SECONDS = 1.5  # for answers, after a sudden end: the machine may be busy, and there is time
RECONNECT_SECONDS = 0.8  # for one attempt to reach a store that is gone: `close` waits for it
LONGEST_PAUSE = 10.0  # seconds between two of these; the first ones come sooner
_ASKED, _HOST_LEFT = "asked", "end"  # entries of the news
_NOT_THE_USERS = frozenset({"torch", "gradsieve", *sys.stdlib_module_names})
_PACKAGES = ("site-packages", "dist-packages")


class Watch:
    """Answers for one rank, and asks for it, on a thread that alone uses the store."""

    def __init__(
        self,
        store: Any,
        prefix: str,
        rank: int,
        world: int,
        progress: Progress,
        fail: Callable[[], None],
        hosts_store: bool = False,
    ) -> None:
        """Start the thread. It calls `fail` once, when there is a verdict."""
        self._notes, self.rank, self.world = Notes(store, prefix), rank, world
        self._progress, self._fail, self._hosts_store = progress, fail, hosts_store
        self.calls = Calls(self._notes, rank, world, progress)
        self.host: tuple[int, ...] = ()  # the rank whose process has the store, if it is one of them
        if hosts_store:
            self._notes.put("host", str(rank))
        self._gave_up: Verdict | None = None
        self._seconds: float | None = None  # for answers, once this rank asks
        self._lost = 0  # ranks that are known not to answer
        self._closed = False
        self.verdict: Verdict | None = None
        # Why no op may be issued here any more. A rank that gave up knows it before its thread has reported
        # it: its next op would be taken for the one in which the others wait.
        self.refusal: Verdict | None = None
        self.without_store: Verdict | None = None  # of any failure, while the store does not answer
        self._wake = threading.Event()
        self._reached = threading.Event()  # the store has answered since this rank asked
        self._decided = threading.Event()
        self._deciding = threading.Lock()  # the watch and a thread that asks may both come to a verdict
        self._thread = threading.Thread(target=self._run, name="gradsieve-watch", daemon=True)
        self._thread.start()

    def ask(self, seconds: float, lost: int = 0) -> Verdict:
        """Find out who is to blame for a failure; `lost` ranks are known not to answer. Return soon after the
        time for answers, also if the store gives none."""
        self._seconds, self._lost = seconds, lost
        self._wake.set()
        if self.without_store is None and not self._decided.wait(seconds + 0.2) and self._reached.is_set():
            self._decided.wait(ANSWER_SECONDS)
        return self._decide(self.without_store or Verdict("store", self.host), publish=False)

    def learn_host(self) -> None:
        """Read which rank has the store, once all ranks have had time to write it."""
        host = parsed(self._notes.get("host")) if self._notes.has("host") else None
        if type(host) is int and 0 <= host < self.world:
            self.host = (host,)

    def move_to(self, connect: Connect | None, prefix: str) -> None:
        """Use this prefix from now on, as all ranks do: no other process knows it."""
        self._notes.move_to(connect, prefix)

    def give_up(self, why: str) -> None:
        """Report that this rank cannot go on, for a reason of its own: the others need not wait for it."""
        self._gave_up = self.refusal = Verdict("gave up", (self.rank,), why[:WORDS])
        self._seconds = 0.0
        self._wake.set()

    def look_now(self) -> None:
        """Poll at once: a call has begun that waits for what is in the store."""
        self._wake.set()

    def close(self) -> None:
        """Leave a note, and end the thread."""
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
            except RuntimeError:  # the store is gone, which matters only to a rank that needs to ask
                self.without_store = Verdict("store", self.host)
            if not self._closed and self._seconds is not None:
                self._decide(self.without_store, publish=False)
            if not self._reconnect():
                return

    def _attend(self) -> None:
        """Wait until this rank or another one fails, or leaves with the store, and act on it."""
        found = self._listen()
        if isinstance(found, Call):
            words = f"{found.words} while rank {self.rank} went on training ({self._progress.what})"
            self._diagnose(Verdict("alone", (found.rank,), words))
        elif self._closed and self._gave_up is None:
            self._leave()
        elif found == _HOST_LEFT:
            what = self._notes.words(f"left/{self.host[0]}") if self.host else ""
            self.without_store = Verdict("left", self.host, what)
        else:
            self._diagnose()

    @property
    def _is_needed(self) -> bool:
        """Say whether this rank itself needs the thread."""
        return self._closed or self._seconds is not None

    def _listen(self) -> Call | str:
        """Poll until this rank fails or closes or another one asks or leaves; return a call of another rank
        that this one has missed."""
        while True:
            self._wake.wait(self.calls.pause or POLL_SECONDS)
            self._wake.clear()
            if self._is_needed:
                return ""
            self.calls.look()
            for entry in self._notes.news():
                if entry in (_ASKED.encode(), _HOST_LEFT.encode()):
                    return entry.decode()
                self.calls.answer(entry)
            if (missed := self.calls.missed()) is not None:
                return missed

    def _reconnect(self) -> bool:
        """Try until the store answers again; False if this rank needs it before, and has to do without."""
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
                        "the store is back a rank that fails cannot be named",
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
        self._notes.put(f"left/{self.rank}", self._progress.what[:WORDS])
        leavers = self._notes.add("leavers", 1)
        if not self._hosts_store:
            return
        self._notes.announce(_HOST_LEFT)
        deadline = time.monotonic() + 1.5 * POLL_SECONDS  # by then all have looked
        while leavers < self.world and time.monotonic() < deadline:
            time.sleep(0.01)
            leavers = self._notes.add("leavers", 0)

    def _diagnose(self, found: Verdict | None = None) -> None:
        """Answer, and come to a verdict or read it, as all ranks do. This rank may have `found` one."""
        notes = self._notes
        if self._gave_up is not None:
            notes.put(f"gave up/{self.rank}", self._gave_up.what)
        leads = notes.add("leaders", 1) == 1
        if self._is_needed or found is not None:  # otherwise another rank has asked
            notes.announce(_ASKED)
        self._reached.set()
        notes.put(f"answer/{self.rank}", self._progress.text())
        notes.add("answers", 1)
        if leads:
            seconds = ANSWER_SECONDS_LATE if self._seconds is None else self._seconds
            self._decide(found or self._examine(seconds))
            return
        try:
            notes.wait("verdict", ANSWER_SECONDS + 0.3)
            verdict = Verdict.read(notes.get("verdict"), self.world)
        except RuntimeError:  # it was the leader that died
            self._decide(self._examine(0.0))
        else:
            self._decide(verdict, publish=False)

    def _examine(self, seconds: float) -> Verdict:
        """Read all answers: once a failure and group, by one rank, a few requests for each of the others."""
        notes, expected = self._notes, self.world - self._lost
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and notes.add("answers", 0) < expected:
            time.sleep(0.02)
        found: dict[str, list[int]] = {"gave up": [], "answer": [], "left": [], "silent": []}
        for rank in range(self.world):
            present = (kind for kind in found if notes.has(f"{kind}/{rank}"))
            found[next(present, "silent")].append(rank)
        for kind in ("gave up", "silent", "left"):
            if ranks := found[kind]:
                what = "" if kind == "silent" else notes.words(f"{kind}/{ranks[0]}")
                return Verdict(kind, tuple(ranks), what)
        answers = {rank: Progress.read(notes.get(f"answer/{rank}")) for rank in found["answer"]}
        farthest = max(progress.ops for progress in answers.values())
        late = [r for r, progress in answers.items() if progress.ops < farthest and not progress.waits]
        return Verdict("late", tuple(late), answers[late[0]].what) if late else Verdict("none")

    def _decide(self, verdict: Verdict, publish: bool = True) -> Verdict:
        """Keep the first verdict, and return it."""
        with self._deciding:
            if self.verdict is not None:
                return self.verdict
            self.verdict = self.refusal = verdict
        self._decided.set()
        if publish:
            self._notes.put("verdict", verdict.text())
        self._fail()
        return verdict


@dataclass(slots=True)
class _Current:
    """The call that this rank is in."""

    call: Call
    since: float = field(default_factory=time.monotonic)
    is_counted: bool = False
    is_noted: bool = False
    is_logged: bool = False

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.since


class Calls:
    """This rank's calls, and its answers to others. All but `begin` and `end` runs on the watch's thread."""

    def __init__(self, notes: Notes, rank: int, world: int, progress: Progress) -> None:
        self._notes, self.rank, self.world, self._progress = notes, rank, world, progress
        self._current: _Current | None = None
        self._met = -1  # place of the last call for which all ranks met
        self._answered = -1  # place of the last call of others that this rank has answered
        self._meeting: Call | None = None  # of another rank, which cannot end unless this one makes it, too

    def begin(self, name: str, step: int, meets: bool) -> None:
        """Note that this rank makes a call; with `meets` it is to wait for `has_met`."""
        self._current = _Current(Call(self.rank, name, step, self._progress.begun, meets))

    def end(self) -> None:
        self._current = None

    def has_met(self) -> bool:
        current = self._current
        return current is not None and self._met >= current.call.place

    @property
    def pause(self) -> float | None:
        """Return the seconds until the next look, if that is sooner than usual."""
        current = self._current
        is_fresh = current is not None and current.call.meets and current.seconds < MEETING_SECONDS
        return FAST_POLL_SECONDS if is_fresh and not self.has_met() else None

    def look(self) -> None:
        """Look after this rank's own call; a short one that does not meet costs no request."""
        current, notes = self._current, self._notes
        if current is None or self.has_met() or (current.call.meets and self._meet(current)):
            return
        call, first = current.call, f"absent/{current.call.place}/first"
        if current.seconds < LONG_CALL_SECONDS:
            return
        if not current.is_noted:
            current.is_noted = True
            if notes.add(f"long/{int(call.meets)}/{call.place}", 1) == 1:
                notes.announce(call.text())
        elif not current.is_logged and notes.has(first):
            current.is_logged = True
            others = notes.add(f"absent/{call.place}", 0) - 1
            more = f"; and for {others} other ranks" if others > 0 else ""
            waited = f"{call.words} has waited {current.seconds:.1f} s for {notes.words(first)}{more}"
            _log.warning("rank %d: %s. %s", self.rank, waited, call.remedy)

    def _meet(self, current: _Current) -> bool:
        """Say whether all ranks have come."""
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

    def answer(self, entry: bytes) -> None:
        """Answer a rank that waits for this one in a call."""
        call = Call.read(entry, self.world)
        if call is None or call.rank == self.rank:
            return
        if call.meets:
            self._meeting = call
        if call.place <= self._answered or self._has_come_to(call):
            return
        self._answered = call.place
        here = where_the_program_is()
        if self._notes.add(f"absent/{call.place}", 1) == 1:
            self._notes.put(f"absent/{call.place}/first", f"rank {self.rank}, which is {here}"[:WORDS])
        waited = f"has waited {LONG_CALL_SECONDS:.1f} s in {call.words} for this rank, which is {here}"
        _log.warning("rank %d: rank %d %s. %s", self.rank, call.rank, waited, call.remedy)

    def _has_come_to(self, call: Call) -> bool:
        """Say whether this rank makes the call, too, or is beyond it."""
        current = self._current
        return (
            self._progress.begun > call.place
            or self._met >= call.place
            or (current is not None and current.call.place == call.place)
            or is_program_in(call.name)
        )

    def missed(self) -> Call | None:
        """Return a call in which another rank waits in vain, because this one has gone on to its next
        exchange."""
        call = self._meeting
        if call is None or self._met >= call.place or self._progress.begun <= call.place:
            return None
        return call


# -- where the user's program is --------------------------------------------------------------------------


def where_the_program_is() -> str:
    """Return `in barrier() at train.py:41`: torch's collective, if the program is in one, and the line of the
    user's, or of a library's if no line is the user's."""
    collective, found = "", ""
    for frame in _frames():
        module, code = _module(frame), frame.f_code
        if module.partition(".")[0] not in _NOT_THE_USERS:
            place = f"{collective}at {Path(code.co_filename).name}:{frame.f_lineno}"
            if not any(name in code.co_filename for name in _PACKAGES):
                return place
            found = found or place
        elif module.startswith("torch.distributed.") and code.co_name != "wrapper":  # torch's, around each
            collective = collective or f"in {code.co_name}() "
    return found or "at an unknown place"


def is_program_in(call: str) -> bool:
    """Say whether the main thread is inside of this call of ours, such as `flush()`."""
    frames = (frame for frame in _frames() if frame.f_code.co_name == call.removesuffix("()"))
    return any(_module(frame).startswith("gradsieve.") for frame in frames)


def _frames() -> Iterator[FrameType]:
    """Yield the main thread's frames, the innermost first."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))
