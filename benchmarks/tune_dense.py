"""Learning rate and weight decay of the training tasks, tuned for dense training: a grid, one seed.

    python benchmarks/tune_dense.py --json benchmarks/results/tuning-dense-2026-11-15.json

The gradient is the mean over four ranks' batches, as in a run with four workers. The best of a task's grid
are trained once more with all their steps; the winner is then written by hand into the tasks' recipes, for
every sync. What FILE knows already is not trained again: after a wider grid, only what is new.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import product
from operator import itemgetter
from pathlib import Path

from gradsieve_tools.bench.common.machine import one_thread
from gradsieve_tools.bench.tasks.training import TASKS, Recipe, Training, batches, shards
from gradsieve_tools.results import Row, table, writable, write

WORLD = 4
SEED = 0


@dataclass(frozen=True, slots=True)
class Grid:
    rates: tuple[float, ...]
    decays: tuple[float, ...]
    part: float = 0.25
    """Of the task's steps, to save time."""
    finalists: int = 1
    """So many of the best are trained with all steps; 0: the grid's best is taken."""


GRIDS = {
    "mlp": Grid((0.05, 0.1, 0.2), (1e-4, 5e-4)),
    "cnn": Grid((0.05, 0.1, 0.2), (1e-4, 5e-4)),
    "transformer": Grid((2e-3, 4e-3, 8e-3), (0.1,)),
    "lstm": Grid((2e-3, 4e-3, 8e-3, 16e-3, 32e-3, 64e-3), (0.1,), finalists=2),
    "recommender": Grid((5e-3, 10e-3, 20e-3, 40e-3), (0.01, 0.1), part=0.5),
    "documentation": Grid((2e-3, 4e-3, 8e-3), (0.1,), part=0.075, finalists=0),
}
COLUMNS = ["task", "parameters", "rate", "decay", "steps", "metric", "value", "seconds"]


def train(training: Training, seed: int) -> float:
    """Dense to the end; the metric."""
    per_rank = training.batch // WORLD
    feeds = [
        batches(shard, per_rank, seed * WORLD + rank) for rank, shard in enumerate(shards(training, WORLD))
    ]
    for _ in range(training.steps):
        training.optimizer.zero_grad()
        for feed in feeds:
            # One rank's examples at a time: batch norm sees no others.
            part = training.train.take(next(feed))
            loss = training.loss(training.model(*part.inputs), part.target) / WORLD
            loss.backward()  # type: ignore[no-untyped-call]
        training.optimizer.step()
        training.schedule.step()
    return training.evaluate()


def tried(recipe: Recipe, part: float) -> Row:
    training = recipe(SEED, round(part * recipe.steps))
    began = time.process_time()  # other processes may want the core as well
    value = train(training, SEED)
    seconds = time.process_time() - began
    figures = training.n, recipe.rate, recipe.decay, training.steps, training.metric, value, seconds
    return dict(zip(COLUMNS, (recipe.name, *figures), strict=True))


class Notes:
    """The result file: rows that are known, and those that come."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[Row] = json.loads(path.read_text())["rows"] if path.exists() else []

    def row(self, recipe: Recipe, part: float) -> Row:
        point = recipe.name, recipe.rate, recipe.decay, round(part * recipe.steps)
        for row in self.rows:
            if (row["task"], row["rate"], row["decay"], row["steps"]) == point:
                return row
        self.rows.append(tried(recipe, part))
        write(self.path, {"world": WORLD, "seed": SEED}, self.rows)
        return self.rows[-1]


def tune(recipe: Recipe, grid: Grid, notes: Notes) -> Row:
    """The best with all steps."""

    def rows(points: Iterable[tuple[float, float]], part: float) -> list[Row]:
        """Best first."""
        made = [notes.row(replace(recipe, rate=rate, decay=decay), part) for rate, decay in points]
        return sorted(made, key=itemgetter("value"), reverse=recipe.metric == "accuracy")

    best = rows(product(grid.rates, grid.decays), grid.part)
    finalists = [(row["rate"], row["decay"]) for row in best[: grid.finalists]]
    return rows(finalists, part=1)[0] if finalists else best[0]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    parser.add_argument("--tasks", nargs="+", choices=GRIDS, default=list(GRIDS), metavar="TASK")
    args = parser.parse_args()
    writable(args.json)
    notes = Notes(args.json)
    with one_thread():
        best = [tune(TASKS[name], GRIDS[name], notes) for name in args.tasks]
    print(table(best, COLUMNS))


if __name__ == "__main__":
    main()
