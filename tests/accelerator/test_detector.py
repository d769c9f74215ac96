"""The detector's rules, each on a trace written by hand: what is ordered is no race, and is one without the
order."""

from __future__ import annotations

import pytest

from accelerator.detector import Detector, Line

MAIN, ENGINE = "thread 0", "thread 1"
USERS, OWN = "stream 0", "stream 1"
BEGIN = 1000


def write(stream: str = USERS, thread: str = MAIN, start: int = 0, stop: int = 8, begin: int = BEGIN) -> Line:
    return Line("launch", thread, stream, "write", ((True, begin, begin + start, begin + stop),))


def read(stream: str = USERS, thread: str = MAIN, kind: str = "launch") -> Line:
    return Line(kind, thread, stream, "read", ((False, BEGIN, BEGIN, BEGIN + 8),))


def host(thread: str = MAIN, writes: bool = True) -> Line:
    return Line("host", thread, "", "host", ((writes, BEGIN, BEGIN, BEGIN + 8),), "line 1")


def carry(thread: str = MAIN, writes: bool = True) -> Line:
    return Line("carry", thread, "", "gloo", ((writes, BEGIN, BEGIN, BEGIN + 8),), "line 1")


def line(kind: str, what: str = "", stream: str = USERS, thread: str = MAIN) -> Line:
    return Line(kind, thread, stream, what)


def races(*trace: Line) -> int:
    named = [line("thread", thread=thread) for thread in (MAIN, ENGINE)]
    return len(Detector().read([*named, *trace]).races)


ORDERED = {
    "an event": [write(), line("record", "1"), line("block", "1", OWN), read(OWN)],
    "a synchronised stream": [write(), line("wait_stream"), read(OWN)],
    "a synchronised device": [write(), line("wait_device"), read(OWN)],
    "a synchronised event": [write(), line("record", "1"), line("wait_event", "1"), read(OWN)],
    "a copy that waits": [read(kind="launch_and_wait"), write(OWN)],
    "a future": [
        write(OWN, ENGINE),
        line("wait_stream", "", OWN, ENGINE),
        line("release", "f", thread=ENGINE),
        line("acquire", "f"),
        read(),
    ],
    "a wait for gloo": [carry(), line("carried"), host()],
    "the host's copy to a buffer": [
        read(OWN, ENGINE),
        line("wait_stream", "", OWN, ENGINE),
        host(ENGINE),
    ],
    "a wait before memory is used again": [
        line("allocate", str(BEGIN)),
        write(),
        line("record", "1"),
        line("block", "1", OWN),
        read(OWN),
        line("free", str(BEGIN)),
        line("record", "2", OWN),
        line("block", "2"),
        line("allocate", "2000"),
        write(begin=2000),
    ],
    "memory that was lent": [
        line("allocate", str(BEGIN)),
        line("lend", str(BEGIN), OWN),
        read(OWN),
        line("free", str(BEGIN)),
        line("allocate", "2000"),
        write(begin=2000),
    ],
    "the time of an event that was waited for": [
        write(),
        line("record", "1"),
        line("wait_event", "1"),
        line("read_time", "1"),
    ],
}
"""Traces without a race; the lines that order them are the ones that touch no memory."""
ORDERS = ("block", "wait_stream", "wait_device", "wait_event", "acquire", "carried", "lend")


@pytest.mark.parametrize("name", ORDERED)
def test_what_is_ordered_is_no_race_and_without_the_order_it_is_one(name: str) -> None:
    trace = ORDERED[name]
    assert races(*trace) == 0
    if name == "a copy that waits":
        assert races(read(), *trace[1:]) == 1
        return
    last = max(place for place, each in enumerate(trace) if each.kind in ORDERS)
    assert races(*trace[:last], *trace[last + 1 :]) == 1


def test_reads_do_not_race_nor_do_parts_that_do_not_overlap() -> None:
    assert races(read(), read(OWN)) == 0
    assert races(write(stop=4), write(OWN, start=4)) == 0
    assert races(write(stop=5), write(OWN, start=4)) == 1


def test_an_event_orders_what_was_queued_before_it_and_nothing_after() -> None:
    assert races(line("record", "1"), write(), line("block", "1", OWN), read(OWN)) == 1


def test_two_ops_of_gloo_run_beside_each_other() -> None:
    assert races(carry(writes=False), carry()) == 1
    assert races(carry(writes=False), line("carried"), carry()) == 0


def test_two_threads_of_the_host_race() -> None:
    assert races(host(), host(ENGINE)) == 1
    assert races(host(writes=False), host(ENGINE, writes=False)) == 0


def test_a_thread_of_autograd_is_the_thread_that_waits_for_it() -> None:
    begins, autograds = line("backward_begins"), "thread 7"
    assert races(write(OWN), line("wait_stream", "", OWN), begins, read(thread=autograds)) == 0
    assert races(write(OWN), begins, read(thread=autograds)) == 1
