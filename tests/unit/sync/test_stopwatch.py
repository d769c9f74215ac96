"""Seconds by which a budget is found: of exchanges, and of nothing else."""

from __future__ import annotations

import time

import pytest

from gradsieve.sync.stopwatch import Stopwatch


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    now = {"wall": 100.0}
    monkeypatch.setattr(time, "perf_counter", lambda: now["wall"])
    return now


def one_exchange(watch: Stopwatch, clock: dict[str, float], slack: float, late: float) -> None:
    clock["wall"] += slack
    watch.need()
    clock["wall"] += late
    watch.got()


def test_a_step_is_reported_with_its_parts_when_the_next_exchange_is_over(clock: dict[str, float]) -> None:
    watch = Stopwatch()
    assert watch.begin().step == 0.0, "there was none before"
    one_exchange(watch, clock, slack=3.0, late=0.5)
    clock["wall"] += 1.0
    assert watch.begin().step == 0.0, "a device need not have come so far"
    one_exchange(watch, clock, slack=2.0, late=0.0)
    assert watch.begin() == (4.5, 3.0, 0.5)
    one_exchange(watch, clock, slack=2.0, late=0.0)
    assert watch.begin() == (2.0, 2.0, 0.0)
    assert watch.slack == 2.0


def test_what_is_forgotten_is_no_step(clock: dict[str, float]) -> None:
    watch = Stopwatch()
    for _ in range(2):
        watch.begin()
        one_exchange(watch, clock, slack=5.0, late=0.0)
    watch.forget()
    for _ in range(2):
        assert watch.begin().step == 0.0
        one_exchange(watch, clock, slack=5.0, late=0.0)
    assert watch.begin().step == 5.0, "the twin"


def test_an_exchange_that_was_not_completed_is_no_step(clock: dict[str, float]) -> None:
    watch = Stopwatch()
    watch.begin()
    clock["wall"] += 5.0
    watch.begin()
    one_exchange(watch, clock, slack=5.0, late=0.0)
    assert watch.begin().step == 0.0


class Stream(Stopwatch):
    """A device's: the host has queued everything long before it happens."""

    now = 0.0

    def moment(self) -> float:
        return self.now


def test_seconds_are_those_of_the_device(clock: dict[str, float]) -> None:
    watch = Stream()
    for _ in range(3):
        seen = watch.begin()
        watch.now += 0.25
        watch.need()
        watch.now += 0.05
        watch.got()
    assert seen == (pytest.approx(0.3), pytest.approx(0.25), pytest.approx(0.05))
