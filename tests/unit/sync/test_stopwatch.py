"""Seconds by which a budget is found: of exchanges, and of nothing else."""

from __future__ import annotations

import time

import pytest

from gradsieve.sync.stopwatch import Stopwatch


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    now = {"wall": 100.0, "worked": 1.0}
    monkeypatch.setattr(time, "perf_counter", lambda: now["wall"])
    monkeypatch.setattr(time, "thread_time", lambda: now["worked"])
    return now


def one_exchange(watch: Stopwatch, clock: dict[str, float], room: float, late: float, work: float) -> None:
    clock["wall"] += room
    watch.need()
    clock["wall"] += late
    watch.got()
    clock["worked"] += work
    watch.done()


def test_a_step_is_told_with_its_parts(clock: dict[str, float]) -> None:
    watch = Stopwatch()
    assert watch.begin().step == 0.0, "there was none before"
    one_exchange(watch, clock, room=3.0, late=0.5, work=0.25)
    watch.begin()
    one_exchange(watch, clock, room=2.0, late=0.0, work=0.125)
    clock["wall"] += 1.0
    assert watch.begin() == (3.0, 2.0, 0.0, 0.125)


def test_what_is_forgotten_is_no_step(clock: dict[str, float]) -> None:
    watch = Stopwatch()
    watch.begin()
    clock["wall"] += 5.0
    watch.forget()
    assert watch.begin().step == 0.0
