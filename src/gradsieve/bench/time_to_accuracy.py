"""`gradsieve bench time-to-accuracy`: training seconds until the test accuracy that dense ends with.

An MLP learns Fashion-MNIST on the hosts of a lab, once with each sync, from the same weights and the same
batches. Dense comes first: where it stands at the end of its budget is the target for all, by one rule, and
nobody else stops before it is there or has taken twice as many steps.

    smoothed accuracy   mean of the last three evaluations; a constant learning rate leaves each one noisy
    target              dense's smoothed accuracy at the end of its budget
    time                training seconds at the first smoothed accuracy that is not below the target

Here are the rule and the summary; `time_to_accuracy_worker` trains.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from gradsieve.bench.in_lab import rows_from_hosts
from gradsieve.bench.models import FASHION_MNIST, read_images
from gradsieve.errors import ConfigError
from gradsieve.types import check_density

COLUMNS = [
    "sync",
    "seconds",
    "steps",
    "times_dense",
    "spread",
    "reached",
    "step_ms",
    "bytes_sent",
    "accuracy",
]

PIXELS, CLASSES = 784, 10
SMOOTHED_OVER = 3
PATIENCE = 2
"""Budgets of steps after which a sync that has not reached the target never will."""
_EVALUATIONS = 30
"""Within one budget."""

Images = tuple[Tensor, Tensor]
"""Pixels as bytes, one row an image, and labels."""


@dataclass(frozen=True, slots=True)
class Plan:
    """All that a measurement depends on but the machine."""

    hosts: int
    rate: str | None
    delay: str | None
    params: int
    density: float
    syncs: list[str]
    steps: int
    """Dense's budget."""
    seeds: int
    batch: int = 32
    """Images that one rank sees in a step."""
    learning_rate: float = 0.05
    momentum: float = 0.9

    def __post_init__(self) -> None:
        check_density(self.density)
        if self.steps < SMOOTHED_OVER:
            raise ConfigError(
                f"a budget of {self.steps} steps is too short for {SMOOTHED_OVER} evaluations: raise --steps"
            )
        if self.params < _params_of(1):
            raise ConfigError(f"the smallest model has {_params_of(1)} parameters: raise --params")
        if self.syncs[:1] != ["dense"]:
            raise ConfigError("dense sets the target, so it must be the first sync")

    @property
    def width(self) -> int:
        """Of both hidden layers, so that the model comes closest to `params`."""
        half = (PIXELS + CLASSES + 2) / 2
        return max(1, round(math.sqrt(half**2 + self.params - CLASSES) - half))

    @property
    def warm_up(self) -> int:
        """Steps in which the learning rate rises to its constant value."""
        return max(1, self.steps // 20)

    def evaluations(self, sync: str) -> list[int]:
        """The steps after which `sync` is evaluated; the same for all but that dense ends with its budget."""
        count = min(_EVALUATIONS, self.steps)
        budgets = 1 if sync == "dense" else PATIENCE
        return [round(place * self.steps / count) for place in range(1, budgets * count + 1)]


def _params_of(width: int) -> int:
    return width**2 + (PIXELS + CLASSES + 2) * width + CLASSES


@dataclass(slots=True)
class Curve:
    """What was reached when: one entry an evaluation."""

    steps: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    accuracy: list[float] = field(default_factory=list)

    def add(self, steps: int, seconds: float, accuracy: float) -> None:
        self.steps.append(steps)
        self.seconds.append(seconds)
        self.accuracy.append(accuracy)

    @property
    def smoothed(self) -> list[float]:
        """Of every evaluation from the third on."""
        ends = range(SMOOTHED_OVER, len(self.accuracy) + 1)
        # Rounded, so that equal counts of right answers are equal means, in whichever order they came.
        return [round(statistics.fmean(self.accuracy[end - SMOOTHED_OVER : end]), 6) for end in ends]

    def crossing(self, target: float) -> int | None:
        """The place of the first evaluation whose smoothed accuracy is not below `target`."""
        places = (place for place, accuracy in enumerate(self.smoothed) if accuracy >= target)
        first = next(places, None)
        return None if first is None else first + SMOOTHED_OVER - 1


@dataclass(slots=True)
class Run:
    """One sync with one seed."""

    sync: str
    seed: int
    target: float
    curve: Curve
    bytes_sent: int
    """Of the busiest rank, in all steps."""

    @property
    def seconds(self) -> float | None:
        """To the target; None if it never got there."""
        place = self.curve.crossing(self.target)
        return None if place is None else self.curve.seconds[place]

    @property
    def steps(self) -> int | None:
        place = self.curve.crossing(self.target)
        return None if place is None else self.curve.steps[place]


def measure(plan: Plan) -> list[Run]:
    """All syncs with all seeds on a lab; needs root."""
    read_images("t10k", FASHION_MNIST)  # or every rank would say that the data is missing
    rows = rows_from_hosts("gradsieve.bench.time_to_accuracy_worker", asdict(plan))
    return [Run(**{**row, "curve": Curve(**row["curve"])}) for row in rows]


def summary(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """One row a sync: means over its seeds, and the runs themselves."""
    dense = {run.seed: run.seconds for run in runs if run.sync == "dense"}
    return [
        _row([run for run in runs if run.sync == sync], dense)
        for sync in dict.fromkeys(run.sync for run in runs)
    ]


def _row(runs: Sequence[Run], dense: dict[int, float | None]) -> dict[str, Any]:
    ratios = [_ratio(dense[run.seed], run.seconds) for run in runs]
    known = [ratio for ratio in ratios if ratio is not None]
    return {
        "sync": runs[0].sync,
        "seconds": _mean([run.seconds for run in runs]),
        "steps": _mean([run.steps for run in runs]),
        "times_dense": _mean(ratios),
        "spread": statistics.stdev(known) if len(known) == len(runs) > 1 else None,
        "reached": f"{len(known)} of {len(runs)}",
        "step_ms": _mean([1e3 * run.curve.seconds[-1] / run.curve.steps[-1] for run in runs]),
        "bytes_sent": _mean([run.bytes_sent / run.curve.steps[-1] for run in runs]),
        "accuracy": _mean([run.curve.smoothed[-1] for run in runs]),
        "runs": [{**asdict(run), "seconds": run.seconds, "steps": run.steps} for run in runs],
    }


def _ratio(top: float | None, bottom: float | None) -> float | None:
    return None if top is None or bottom is None else top / bottom


def _mean(values: Sequence[float | None]) -> float | None:
    """None if a seed has no value: a mean over those that got there would flatter."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if len(known) == len(values) else None
