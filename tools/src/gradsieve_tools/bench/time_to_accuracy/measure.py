"""`gradsieve bench time-to-accuracy`: training seconds until the model is as good as dense ends.

The hosts of a lab learn a task, once with each sync, from the same weights and the same batches. Dense comes
first: where it stands at the end of its budget is the target for all, by one rule, and no other sync
stops before it is there or has taken twice as many steps.

`common/race.py` has the rule, `tasks/sized.py` what is learnt; `worker.py` trains.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gradsieve.errors import ConfigError, GradsieveError
from gradsieve.schemes import check_density
from gradsieve_tools.bench.common.in_lab import rows_from_hosts
from gradsieve_tools.bench.common.race import PATIENCE, SMOOTHED_OVER, Curve, Run, mean, row_of
from gradsieve_tools.bench.common.syncs import steps_late
from gradsieve_tools.bench.tasks.sized import TASKS, SizedTask
from gradsieve_tools.bench.tasks.training import Recipe

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

_EVALUATIONS = 30  # within one budget


@dataclass(frozen=True, slots=True)
class Plan:
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
        recipe = self.recipe
        return {
            **asdict(self),
            "width": self.sized.width(self.params),
            "batch": self.sized.batch,
            "optimizer": recipe.optimizer,
            "learning_rate": recipe.rate,
            "weight_decay": recipe.decay,
        }

    @property
    def title(self) -> str:
        links = " and ".join(filter(None, [self.rate or "unshaped", self.delay]))
        return f"{self.sized.title}, {self.params:,} parameters: {self.hosts} hosts, {links}"

    def evaluations(self, sync: str) -> list[int]:
        """The steps after which `sync` is evaluated; the same for all but that dense ends with its budget."""
        count = min(_EVALUATIONS, self.steps)
        budgets = 1 if sync == "dense" else PATIENCE
        return [round(place * self.steps / count) for place in range(1, budgets * count + 1)]


def measure(plan: Plan) -> list[Run]:
    """Train all syncs with all seeds on a lab, as root."""
    plan.recipe.data()  # or every rank would say that it is missing
    rows = rows_from_hosts("gradsieve_tools.bench.time_to_accuracy.worker", asdict(plan))
    runs = [Run(**{**row, "curve": Curve(**row["curve"])}) for row in rows]
    if not all(math.isfinite(run.target) for run in runs):
        raise GradsieveError("dense diverged, so that there is no target: change --params or --hosts")
    return runs


def summary(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return one row a sync: means over its seeds, and the runs themselves."""
    by_name = {
        name: [run for run in runs if run.name == name] for name in dict.fromkeys(run.name for run in runs)
    }
    return [_row(own, by_name["dense"]) for own in by_name.values()]


def _row(runs: Sequence[Run], dense: Sequence[Run]) -> dict[str, Any]:
    bytes_sent = statistics.fmean(run.bytes_sent / run.curve.steps[-1] for run in runs)
    return {
        "sync": runs[0].name,
        "late": steps_late(runs[0].name),
        **row_of(runs, dense),
        "bytes_sent": bytes_sent,
        "bits": 8 * bytes_sent / runs[0].parameters,
        "final": mean([_finite(run.curve.smoothed[-1]) for run in runs]),
        "runs": [{**_plain(run), "seconds": run.seconds, "steps": run.steps} for run in runs],
    }


def _plain(run: Run) -> dict[str, Any]:
    """Return what JSON can have: null for what is not finite, because the training diverged."""
    plain = asdict(run)
    plain["curve"]["values"] = [_finite(value) for value in run.curve.values]
    return plain


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
