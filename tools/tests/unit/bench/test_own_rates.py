"""`gradsieve bench accuracy --own-rates`: a comparison in which every sync has the rate that suits it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace

import pytest

from gradsieve_tools.bench.accuracy import measure as accuracy
from gradsieve_tools.bench.accuracy.measure import Case
from gradsieve_tools.bench.common import virtual
from gradsieve_tools.bench.tasks import training as tasks

RATES = (0.5, 1.0, 2.0)


def kept(finals: dict[str, Sequence[float]], task: str) -> accuracy.Found:
    """What trainings with the first seed ended with, by sync, at each of the rates."""
    return [
        (Case(task=task, sync=sync, rate=rate, steps=10), asdict(virtual.Course([10], [final])))
        for sync, values in finals.items()
        for rate, final in zip(RATES, values, strict=True)
    ]


def chosen(found: accuracy.Found, seeds: int = 3) -> dict[str, set[float]]:
    """Rates of each sync with seeds after the first."""
    todo = [replace(case, seed=seed) for case, _ in found for seed in range(seeds)]
    rates: dict[str, set[float]] = {}
    for case in accuracy.at_own_rates(todo, found):
        rates.setdefault(case.sync, set()).add(case.rate)
    return rates


@pytest.mark.parametrize(("task", "sign"), [("transformer", 1), ("cnn", -1)])
def test_every_sync_goes_on_with_the_rate_that_ended_best(task: str, sign: int) -> None:
    """The lowest loss, or the highest accuracy."""
    losses = {"dense": (3, 1, 2), "demo": (3, 2, 1), "sparta": (1, 2, 3)}
    found = kept({sync: [sign * each for each in values] for sync, values in losses.items()}, task)
    assert tasks.BETTER[tasks.TASKS[task].metric] == -sign
    assert chosen(found) == {"dense": {1.0}, "demo": {2.0}, "sparta": {0.5}}
