"""Whom ranks blame, found out over a store in this process; each rank is a thread."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from torch.distributed import HashStore, TCPStore

from gradsieve import torch_names
from gradsieve.comm import failures, sockets
from gradsieve.comm.failures import Watch
from gradsieve.comm.notes import Call, Notes, Progress, Verdict

WINDOW = 0.4
LONG = 20.0
"""Seconds to ask for where nobody should wait so long, however busy the machine is."""


class Ring:
    """Watches of some of the ranks of a group; the others are dead."""

    def __init__(self, world: int, alive: dict[int, Progress], store: Any = None) -> None:
        self.store = store or HashStore()
        self.failed: list[int] = []
        self.watches = {rank: self._watch(rank, world, progress) for rank, progress in alive.items()}

    def _watch(self, rank: int, world: int, progress: Progress) -> Watch:
        return Watch(self.store, "here", rank, world, progress, lambda: self.failed.append(rank))

    def ask(self, *ranks: int) -> list[Verdict]:
        with ThreadPoolExecutor(len(ranks)) as threads:
            return list(threads.map(lambda rank: self.watches[rank].ask(WINDOW), ranks))

    def verdicts(self) -> set[Verdict | None]:
        return {watch.verdict for watch in self.watches.values()}

    def close(self) -> None:
        for watch in self.watches.values():
            watch.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(failures, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(failures, "LONG_CALL_SECONDS", 0.2)
    yield
    assert [thread for thread in threading.enumerate() if thread.name == "gradsieve-watch"] == []


def waiting(ops: int = 3) -> Progress:
    return Progress(ops, True, "unit 0 of 1 in step 5")


def until(condition: Callable[[], bool], seconds: float = LONG) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_who_does_not_answer_is_named_by_all_also_by_those_who_did_not_ask() -> None:
    ring = Ring(4, {0: waiting(), 2: waiting(), 3: Progress(2, False, "unit 0 of 1 in step 4")})
    assert ring.ask(0) == [Verdict("silent", (1,))]
    until(lambda: len(ring.failed) == 3)
    assert ring.verdicts() == {Verdict("silent", (1,))}, "not rank 3, which is late and lives"
    assert "rank 1 died, or is stopped" in Verdict("silent", (1,)).cause(0)
    ring.close()


def test_the_living_ones_are_not_waited_for_where_it_is_known_how_many_there_are() -> None:
    ring = Ring(3, {0: waiting(), 2: waiting()})
    start = time.monotonic()
    assert ring.watches[0].ask(LONG, lost=1) == Verdict("silent", (1,))
    assert time.monotonic() - start < LONG / 2
    ring.close()


def test_who_left_is_named_as_such() -> None:
    ring = Ring(3, {0: waiting(), 1: Progress(2, False, "unit 0 of 1 in step 4"), 2: waiting()})
    ring.watches.pop(1).close()
    assert ring.ask(0, 2) == [Verdict("left", (1,), "unit 0 of 1 in step 4")] * 2
    assert "drop_last=True" in ring.verdicts().pop().cause(0)  # type: ignore[union-attr]
    ring.close()


def test_who_lives_and_does_not_come_is_named() -> None:
    ring = Ring(3, {0: waiting(), 1: Progress(2, False, "unit 0 of 1 in step 4"), 2: waiting()})
    assert ring.ask(0, 2) == [Verdict("late", (1,), "unit 0 of 1 in step 4")] * 2
    until(lambda: 1 in ring.failed)
    assert "rank 1 (this one) lives" in ring.verdicts().pop().cause(1)  # type: ignore[union-attr]
    ring.close()


def test_nobody_is_blamed_where_all_wait() -> None:
    """One of them may be an op ahead: its part of the last one was done before."""
    ring = Ring(2, {0: waiting(3), 1: waiting(2)})
    assert ring.ask(0, 1) == [Verdict("none")] * 2
    ring.close()


def test_who_gives_up_says_why_and_nobody_waits() -> None:
    ring = Ring(3, {0: waiting(), 1: waiting(), 2: waiting()})
    ring.watches[2].give_up("MemoryError: no room\n")
    until(lambda: len(ring.failed) == 3)
    assert ring.verdicts() == {Verdict("gave up", (2,), "MemoryError: no room")}
    ring.close()


def test_who_gives_up_and_closes_at_once_is_not_taken_for_one_who_left() -> None:
    ring = Ring(2, {0: waiting(), 1: waiting()})
    ring.watches[1].give_up("MemoryError: no room")
    ring.watches.pop(1).close()
    until(lambda: 0 in ring.failed)
    assert ring.verdicts() == {Verdict("gave up", (1,), "MemoryError: no room")}
    ring.close()


class Slow(Watch):
    """Takes a moment to note its verdict, in which another thread can come to one."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "verdict" and value is not None:
            time.sleep(0.1)
        super().__setattr__(name, value)


def test_two_threads_come_to_one_verdict() -> None:
    failed: list[int] = []
    watch = Slow(HashStore(), "here", 0, 2, waiting(), lambda: failed.append(0))
    both = [Verdict("silent", (1,)), Verdict("store", (0,))]
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda verdict: watch._decide(verdict, publish=False), both))
    assert failed == [0], "the second verdict changes nothing, and connections are ended once"
    watch.close()


def test_a_leader_who_dies_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "ANSWER_SECONDS", 0.5)
    ring = Ring(3, {0: waiting(), 2: waiting()})
    ring.store.add("here/leaders", 1)
    assert ring.ask(0, 2) == [Verdict("silent", (1,))] * 2
    ring.close()


class Stuck:
    """A store whose host is stopped: calls fail, at the end of the test."""

    def __init__(self) -> None:
        self.end = threading.Event()

    def __getattr__(self, name: str) -> Callable[..., None]:
        def hang(*_: Any) -> None:
            self.end.wait(5.0)
            raise RuntimeError("Connection reset by peer")

        return hang


class Gone:
    """A store whose host has died."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        def fail(*_: Any) -> None:
            raise RuntimeError("Connection reset by peer")

        return fail


def test_a_store_that_hangs_is_named_in_time() -> None:
    ring = Ring(2, {1: waiting()}, store := Stuck())
    ring.watches[1].host = (0,)
    start = time.monotonic()
    assert ring.ask(1) == [Verdict("store", (0,))]
    assert time.monotonic() - start < LONG, "the store hangs until this test ends it"
    store.end.set()
    ring.close()


def test_a_store_that_is_gone_is_named_at_once_and_harms_nobody_before() -> None:
    ring = Ring(2, {1: waiting()}, Gone())
    time.sleep(0.2)
    assert ring.failed == []
    start = time.monotonic()
    assert ring.watches[1].ask(LONG) == Verdict("store")
    assert time.monotonic() - start < LONG / 2
    assert "none of these ranks" in Verdict("store").cause(1)
    ring.close()


def test_who_has_the_store_tells_that_it_leaves() -> None:
    store = HashStore()
    host = Watch(store, "here", 0, 2, waiting(), lambda: None, hosts_store=True)
    ring = Ring(2, {1: waiting()}, store)
    ring.watches[1].learn_host()
    host.close()
    assert ring.ask(1) == [Verdict("left", (0,), waiting().what)]
    ring.close()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"[" * 100_000,
        b'["silent", [3], ""]',
        b'["silent", [-1], ""]',
        b'["silent", [true], ""]',
        b'["silent", [1.0], ""]',
        b'["silent", "1", ""]',
        b'["sudden", [1], ""]',
        b'["silent", [1]]',
        b"\xff" * 70_000,
    ],
)
def test_a_verdict_that_makes_no_sense_is_none(content: bytes) -> None:
    assert Verdict.read(content, world=3) == Verdict("unknown")


@pytest.mark.parametrize(
    "content", [b"", b"[-1, true, 1]", b"9" * 400, b"[1e400, true, 1]", b'["1", true, "x"]', b'[3, 1, "x"]']
)
def test_an_answer_that_makes_no_sense_is_one_of_a_rank_that_is_nowhere(content: bytes) -> None:
    assert Progress.read(content).ops == 0


def test_what_is_told_is_read_as_it_was() -> None:
    verdict = Verdict("late", (1, 2), "unit 0 of 1 in step 4")
    assert Verdict.read(verdict.text().encode(), 3) == verdict
    assert Progress.read(waiting().text().encode()) == waiting()
    assert Verdict.read(Verdict("left", (1,), "\x1b[2J\n").text().encode(), 3).what == "[2J"


# -- calls that wait --------------------------------------------------------------------------------------


def test_a_note_that_makes_no_sense_is_none() -> None:
    for content in (
        b"",
        b"[]",
        b'[9, "flush()", 1, 2, true]',
        b'[0, "flush()", -1, 2, true]',
        b"[" * 400,
        b"\xff",
    ):
        assert Call.read(content, world=2) is None
    mine = Call(1, "flush()", 6, 9, False)
    assert Call.read(mine.text().encode(), world=2) == mine


def test_news_are_heard_once_also_where_two_tell_at_once() -> None:
    store = HashStore()
    one, two, reader = (Notes(store, "here") for _ in range(3))
    assert list(reader.news()) == []
    one.announce("first")
    assert list(reader.news()) == [b"first"]
    assert list(reader.news()) == []
    two.announce("second")
    two.announce("second")
    one.announce("first")
    assert list(reader.news()) == [b"second"], "although two has not read what one told"


def pair(progress: Progress) -> tuple[list[Progress], list[int], list[Watch]]:
    """How far each of two ranks has come, for tests to change; who failed; their watches."""
    store, failed = HashStore(), list[int]()
    both = [replace(progress, begun=4) for _ in range(2)]

    def watch(rank: int) -> Watch:
        return Watch(store, "here", rank, 2, both[rank], lambda: failed.append(rank))

    return both, failed, [watch(rank) for rank in range(2)]


def test_who_passed_a_call_by_is_found_out_also_when_it_does_so_later() -> None:
    both, failed, watches = pair(Progress(3, True, "unit 0 of 1 in step 5"))
    watches[0].calls.begin("verify()", 5, meets=True)
    time.sleep(0.6)
    assert failed == []
    both[1].begun = 5
    until(lambda: len(failed) == 2)
    for watch in watches:
        assert watch.verdict is not None
        assert (watch.verdict.kind, watch.verdict.ranks) == ("alone", (0,))
        assert "verify() after step 5 while rank 1 went on training" in watch.verdict.cause(1)
        watch.close()


def test_those_that_assembled_may_go_on_at_unlike_times() -> None:
    both, failed, watches = pair(Progress(3, False, ""))
    watches[0].calls.begin("verify()", 5, meets=True)
    time.sleep(0.5)
    watches[1].calls.begin("verify()", 5, meets=True)
    until(watches[1].calls.has_met)
    both[1].begun = 5
    watches[1].calls.end()
    until(watches[0].calls.has_met)
    time.sleep(0.3)
    assert failed == []
    for watch in watches:
        watch.close()


# -- a store behind a network -----------------------------------------------------------------------------


def served(port: int = 0) -> TCPStore:
    return TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)


def secretly(ring: Ring, server: TCPStore) -> Ring:
    for watch in ring.watches.values():
        watch.move_to(partial(torch_names.connected_to, server), "a secret")
    return ring


def reset_connections(port: int) -> None:
    """As a firewall does that has forgotten them."""
    for fd in sockets.connected(0):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as one:
            if one.getpeername()[1] == port:
                one.shutdown(socket.SHUT_RDWR)


def test_a_watch_whose_connection_was_reset_connects_again(caplog: pytest.LogCaptureFixture) -> None:
    server = served()
    ring = secretly(Ring(3, {0: waiting(), 2: waiting()}, server), server)
    reset_connections(server.port)
    until(lambda: sum("is back after" in record.getMessage() for record in caplog.records) == 2)
    assert ring.ask(0) == [Verdict("silent", (1,))]
    until(lambda: len(ring.failed) == 2)
    assert ring.verdicts() == {Verdict("silent", (1,))}
    ring.close()


def test_one_that_cannot_connect_again_blames_the_store() -> None:
    """Twin."""
    server = served()
    ring = Ring(3, {0: waiting(), 2: waiting()}, torch_names.connected_to(server, 5.0))
    reset_connections(server.port)
    until(lambda: all(watch.without_store for watch in ring.watches.values()))
    assert {verdict.kind for verdict in ring.ask(0, 2)} == {"store"}
    ring.close()


def test_a_stranger_who_knows_all_but_the_secret_ends_nothing() -> None:
    server = served()
    ring = secretly(Ring(2, {0: waiting(), 1: waiting()}, server), server)
    stranger = torch_names.connected_to(server, 5.0)
    poke(stranger, "here")
    time.sleep(4 * failures.POLL_SECONDS)
    assert ring.verdicts() == {None}
    poke(stranger, "a secret")  # twin: one who knows it
    until(lambda: ring.verdicts() == {Verdict("gave up", (1,), "forged")})
    ring.close()


def poke(store: TCPStore, prefix: str) -> None:
    store.set(f"{prefix}/verdict", Verdict("gave up", (1,), "forged").text())
    store.add(f"{prefix}/leaders", 1)
    store.set(f"{prefix}/news/0", "asked")
