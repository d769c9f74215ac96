"""Seconds to a target: what a training reached when, and what a comparison says of it.

smoothed value   mean of the last three evaluations; a constant learning rate leaves each one noisy
target           dense's smoothed value at the end of its budget
time             training seconds at the first smoothed value that is not worse than the target
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradsieve_tools.bench.tasks.training import Metric

SMOOTHED_OVER = 3
PATIENCE = 2  # budgets of steps after which a training that has not reached the target never will


@dataclass(slots=True)
class Curve:
    metric: Metric
    steps: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, steps: int, seconds: float, value: float) -> None:
        self.steps.append(steps)
        self.seconds.append(seconds)
        self.values.append(value)

    @property
    def smoothed(self) -> list[float]:
        """Return the smoothed value of every evaluation from the third on."""
        ends = range(SMOOTHED_OVER, len(self.values) + 1)
        # Rounded, so that equal counts of right answers are equal means, in whichever order they came.
        return [round(statistics.fmean(self.values[end - SMOOTHED_OVER : end]), 6) for end in ends]

    def crossing(self, target: float) -> int | None:
        """Return the place of the first evaluation whose smoothed value is not worse than `target`."""
        sign = -1 if self.metric == "loss" else 1
        places = (place for place, value in enumerate(self.smoothed) if sign * value >= sign * target)
        first = next(places, None)
        return None if first is None else first + SMOOTHED_OVER - 1


@dataclass(slots=True)
class Run:
    name: str
    seed: int
    target: float
    curve: Curve
    bytes_sent: int = 0  # busiest rank, all steps
    parameters: int = 0
    failed: bool = False

    @property
    def place(self) -> int | None:
        """The evaluation that reached the target."""
        return None if self.failed else self.curve.crossing(self.target)

    @property
    def seconds(self) -> float | None:
        return None if self.place is None else self.curve.seconds[self.place]

    @property
    def steps(self) -> int | None:
        return None if self.place is None else self.curve.steps[self.place]


def row_of(runs: Sequence[Run], dense: Sequence[Run]) -> dict[str, Any]:
    """Return means over the seeds of one name, against dense of the same seeds."""
    theirs = {run.seed: run.seconds for run in dense}
    seconds = [run.seconds for run in runs]
    ratios = [_ratio(theirs[run.seed], run.seconds) for run in runs]
    ran = [run.curve for run in runs if run.curve.steps]
    return {
        "seconds": mean(seconds),
        "spread_seconds": spread(seconds),
        "steps": mean([run.steps for run in runs]),
        "times_dense": mean(ratios),
        "spread": spread(ratios),
        "reached": f"{sum(each is not None for each in seconds)} of {len(runs)}",
        "step_ms": mean([1e3 * curve.seconds[-1] / curve.steps[-1] for curve in ran]),
    }


def _ratio(top: float | None, bottom: float | None) -> float | None:
    return None if top is None or bottom is None else top / bottom


def mean(values: Sequence[float | None]) -> float | None:
    """Return None if a seed has no value: a mean over the others would flatter."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known and len(known) == len(values) else None


def spread(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.stdev(known) if len(known) == len(values) > 1 else None
