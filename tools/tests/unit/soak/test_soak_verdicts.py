"""What grows is seen, however it grows; what only moves is not."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest

from gradsieve_tools.soak.verdicts import MEASURES, Line, Look, verdict_of

STEPS, EVERY = 20_000, 100


def looks(change: Callable[[Look], Look] = lambda look: look) -> list[Look]:
    """Memory that warms up and then moves by some hundred kB, as a real rank's does."""
    chance = Random(1)
    plain = [
        Look(step, 386_000 - 9000 * math.exp(-step / 800) + chance.uniform(-200, 200), 110, 24, 9)
        for step in range(EVERY, STEPS + 1, EVERY)
    ]
    return [change(replace(look, objects=110 + chance.randrange(-5, 6))) for look in plain]


def verdicts(seen: list[Look]) -> dict[str, Line]:
    return {line.measure: line for line in verdict_of("stripes", 0, seen, STEPS)}


def test_a_training_that_only_warms_up_is_flat() -> None:
    found = verdicts(looks())
    assert set(found) == set(MEASURES)
    assert all(line.is_good for line in found.values()), found


@pytest.mark.parametrize(
    ("measure", "change"),
    [
        ("memory_kb", lambda look: replace(look, memory_kb=look.memory_kb + 0.1 * look.step)),
        ("memory_kb", lambda look: replace(look, memory_kb=look.memory_kb + 2000 * (look.step > 15_500))),
        ("objects", lambda look: replace(look, objects=look.objects + look.step // 200)),
        ("files", lambda look: replace(look, files=look.files + (look.step > 15_500))),
        ("files", lambda look: replace(look, files=look.files + look.step // 5000)),
        ("threads", lambda look: replace(look, threads=look.threads + look.step // 9000)),
    ],
    ids=["100 bytes a step", "2 MB at once", "an object in 200 steps", "a file", "four files", "threads"],
)
def test_what_grows_is_found_and_nothing_else(measure: str, change: Callable[[Look], Look]) -> None:
    found = verdicts(looks(change))
    assert [name for name, line in found.items() if not line.is_good] == [measure]
    assert found[measure].verdict.startswith("grew by")


def test_a_run_that_broke_off_has_no_verdict() -> None:
    for seen in (looks()[:-5], looks()[-3:], []):
        (line,) = verdict_of("stripes", 0, seen, STEPS)
        assert "no verdict" in line.verdict
        assert not line.is_good
