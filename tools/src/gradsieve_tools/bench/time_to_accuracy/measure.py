"""`gradsieve bench time-to-accuracy`: training seconds until the model is as good as dense ends.

The hosts of a lab learn a task, once with each sync, from the same weights and the same batches. Dense comes
first: where it stands at the end of its budget is the target for all, by one rule, and nobody else stops
before it is there or has taken twice as many steps.

    smoothed value   mean of the last three evaluations; a constant learning rate leaves each one noisy
    target           dense's smoothed value at the end of its budget
    time             training seconds at the first smoothed value that is not worse than the target

Here are the rule and the summary; `sized_tasks` has what is learnt, `time_to_accuracy_worker` trains.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from gradsieve.errors import ConfigError, GradsieveError
from gradsieve.schemes import check_density
from gradsieve_tools.bench.common.in_lab import rows_from_hosts
from gradsieve_tools.bench.common.syncs import steps_late
from gradsieve_tools.bench.tasks.sized import TASKS, SizedTask
from gradsieve_tools.bench.tasks.training import BETTER, Metric, Recipe

COLUMNS = [
    "hosts",
    "sync",
    "late",
    "seconds",
    "steps",
    "times_dense",
    "spread",
    "reached",
    "step_ms",
    "bytes_sent",
    "bits",
    "final",
]

SMOOTHED_OVER = 3
PATIENCE = 2  # budgets of steps after which a sync that has not reached the target never will
_EVALUATIONS = 30  # within one budget


@dataclass(frozen=True, slots=True)
class Plan:
    """All that a measurement depends on but the machine."""

    hosts: int
    rate: str | None
    delay: str | None
    task: str
    params: int
    density: float
    syncs: list[str]
    steps: int  # dense's budget
    seeds: int
    record: str | None = None  # A folder for what every rank did in every step

    def __post_init__(self) -> None:
        check_density(self.density)
        if self.steps < SMOOTHED_OVER:
            raise ConfigError(
                f"a budget of {self.steps} steps is too short for {SMOOTHED_OVER} evaluations: raise --steps"
            )
        if self.syncs[:1] != ["dense"]:
            raise ConfigError("dense sets the target, so it must be the first sync")
        self.sized.width(self.params)  # refuses what is too small

    @property
    def sized(self) -> SizedTask:
        return TASKS[self.task]

    @property
    def recipe(self) -> Recipe:
        return self.sized.of(self.sized.width(self.params))

    def facts(self) -> dict[str, Any]:
        """For whoever reads a result: also what follows from the rest."""
        recipe = self.recipe
        return {
            **asdict(self),
            "width": self.sized.width(self.params),
            "batch": self.sized.batch,
            "optimizer": recipe.optimizer,
            "learning_rate": recipe.rate,
            "weight_decay": recipe.decay,
        }

    def evaluations(self, sync: str) -> list[int]:
        """The steps after which `sync` is evaluated; the same for all but that dense ends with its budget."""
        count = min(_EVALUATIONS, self.steps)
        budgets = 1 if sync == "dense" else PATIENCE
        return [round(place * self.steps / count) for place in range(1, budgets * count + 1)]


@dataclass(slots=True)
class Curve:
    """What was reached when: one entry an evaluation."""

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
        """Of every evaluation from the third on."""
        ends = range(SMOOTHED_OVER, len(self.values) + 1)
        # Rounded, so that equal counts of right answers are equal means, in whichever order they came.
        return [round(statistics.fmean(self.values[end - SMOOTHED_OVER : end]), 6) for end in ends]

    def crossing(self, target: float) -> int | None:
        """The place of the first evaluation whose smoothed value is not worse than `target`."""
        sign = BETTER[self.metric]
        places = (place for place, value in enumerate(self.smoothed) if sign * value >= sign * target)
        first = next(places, None)
        return None if first is None else first + SMOOTHED_OVER - 1


@dataclass(slots=True)
class Run:
    """One sync with one seed."""

    sync: str
    seed: int
    target: float
    curve: Curve
    bytes_sent: int  # busiest rank, all steps
    parameters: int

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
    plan.recipe.data()  # or every rank would say that it is missing
    rows = rows_from_hosts("gradsieve_tools.bench.time_to_accuracy.worker", asdict(plan))
    runs = [Run(**{**row, "curve": Curve(**row["curve"])}) for row in rows]
    if not all(math.isfinite(run.target) for run in runs):
        raise GradsieveError("dense diverged, so that there is no target: change --params or --hosts")
    return runs


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
    bytes_sent = statistics.fmean(run.bytes_sent / run.curve.steps[-1] for run in runs)
    return {
        "sync": runs[0].sync,
        "late": steps_late(runs[0].sync),
        "seconds": _mean([run.seconds for run in runs]),
        "steps": _mean([run.steps for run in runs]),
        "times_dense": _mean(ratios),
        "spread": statistics.stdev(known) if len(known) == len(runs) > 1 else None,
        "reached": f"{len(known)} of {len(runs)}",
        "step_ms": _mean([1e3 * run.curve.seconds[-1] / run.curve.steps[-1] for run in runs]),
        "bytes_sent": bytes_sent,
        "bits": 8 * bytes_sent / runs[0].parameters,
        "final": _mean([_finite(run.curve.smoothed[-1]) for run in runs]),
        "runs": [{**_plain(run), "seconds": run.seconds, "steps": run.steps} for run in runs],
    }


def _plain(run: Run) -> dict[str, Any]:
    """As JSON can have it: null for what is not finite, because the training diverged."""
    plain = asdict(run)
    plain["curve"]["values"] = [_finite(value) for value in run.curve.values]
    return plain


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _ratio(top: float | None, bottom: float | None) -> float | None:
    return None if top is None or bottom is None else top / bottom


def _mean(values: Sequence[float | None]) -> float | None:
    """None if a seed has no value: a mean over those that got there would flatter."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if len(known) == len(values) else None
