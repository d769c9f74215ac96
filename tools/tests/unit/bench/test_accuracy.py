"""`gradsieve bench accuracy`: which trainings there are, what is kept of them, what the table says."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gradsieve.errors import ConfigError
from gradsieve_tools.bench.accuracy import measure as accuracy
from gradsieve_tools.bench.accuracy.measure import Case
from gradsieve_tools.bench.common import virtual
from gradsieve_tools.bench.common.machine import one_thread
from gradsieve_tools.bench.tasks import training as tasks
from gradsieve_tools.results import table
from tiny_task import TASK, tiny

__all__ = ["tiny"]

CASE = Case(task="cnn", sync="dense", steps=10)
SPARSE = replace(CASE, sync="exdyna", density=0.01)


def course(*values: float, **others: Any) -> dict[str, Any]:
    return asdict(virtual.Course(list(range(1, len(values) + 1)), list(values), **others))


def keep(folder: Path, case: Case, own: dict[str, Any]) -> Path:
    path = folder / case.file
    path.write_text(json.dumps({"case": asdict(case), "versions": {}, "course": own}))
    return path


def test_ranks_that_cannot_share_a_batch_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"3 ranks cannot share the 128 examples of a step of cnn"):
        accuracy.cases(["cnn"], ["dense"], ["default"], [1.0], [], [3], 1, True, None)


# -- what is kept -----------------------------------------------------------------------------------------


def test_only_what_is_not_there_is_missing(tmp_path: Path) -> None:
    todo = [replace(CASE, seed=seed) for seed in range(3)]
    paths = [keep(tmp_path, case, course(0.5)) for case in todo]
    assert accuracy.missing(todo, tmp_path) == []
    paths[1].unlink()
    assert accuracy.missing(todo, tmp_path) == [todo[1]]
    assert accuracy.missing(todo, tmp_path / "not there yet") == todo


def test_a_foreign_record_is_named(tmp_path: Path) -> None:
    path = keep(tmp_path, CASE, course(0.5))
    assert accuracy.read(tmp_path) == [(CASE, course(0.5))]
    record = json.loads(path.read_text())
    record["case"]["seed"] = 5
    path.write_text(json.dumps(record))
    with pytest.raises(ConfigError, match=path.name):
        accuracy.read(tmp_path)


# -- what the table says ----------------------------------------------------------------------------------


def test_rows_are_means_over_seeds_and_gaps_in_points_of_accuracy() -> None:
    dense = [(replace(CASE, seed=seed), course(0.1, value)) for seed, value in enumerate((0.90, 0.92, 0.94))]
    worse = [(replace(SPARSE, seed=seed), course(0.1, value)) for seed, value in enumerate((0.89, 0.90))]
    first, second = accuracy.rows([*dense, *worse])
    assert (first["sync"], first["seeds"], first["final"], first["gap"]) == ("dense", 3, 0.92, 0.0)
    assert first["spread"] == pytest.approx(0.02)
    assert (second["sync"], second["seeds"], second["final"]) == ("exdyna", 2, 0.895)
    assert second["gap"] == pytest.approx(1.5)  # 1 and 2 points, seed by seed; below dense is above zero
    assert second["gap_spread"] == pytest.approx(math.sqrt(0.5), abs=1e-3)


def test_a_training_that_diverged_has_no_mean_and_breaks_neither_table_nor_json(tmp_path: Path) -> None:
    diverged = course(0.3, math.nan, fidelity=[math.inf, 0.5])
    keep(tmp_path, SPARSE, accuracy._plain(diverged))
    keep(tmp_path, replace(SPARSE, seed=1), course(0.3, 0.8))
    keep(tmp_path, CASE, course(0.3, 0.9))
    for path in tmp_path.iterdir():
        json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    dense, row = accuracy.rows(accuracy.read(tmp_path))
    assert dense["diverged"] == 0
    assert (row["seeds"], row["diverged"], row["final"], row["spread"], row["gap"]) == (
        2,
        1,
        None,
        None,
        None,
    )
    assert row["fidelity"] == 0.5
    json.dumps([dense, row], allow_nan=False)
    assert "nan" not in table([dense, row], accuracy.COLUMNS)


def plain_sgd(seed: int, world: int, steps: int) -> float:
    """One process, one model, on the mean of the ranks' losses."""
    training = tasks.build(TASK, seed, steps)
    feeds = [virtual.own_batches(training, rank, world, True, seed) for rank in range(world)]
    for _ in range(steps):
        training.optimizer.zero_grad()
        losses: list[Tensor] = []
        for feed in feeds:
            batch = training.train.take(next(feed))
            losses.append(training.loss(training.model(*batch.inputs), batch.target))
        torch.stack(losses).mean().backward()
        training.optimizer.step()
        training.schedule.step()
    answer = training.model(*training.test.inputs)
    return training.loss(answer, training.test.target).item()


@pytest.mark.usefixtures("tiny")
def test_dense_on_virtual_ranks_is_plain_sgd_and_steps_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow: two whole trainings, which is what `bench accuracy` is."""
    monkeypatch.setitem(tasks.TASKS, TASK, replace(tasks.TASKS[TASK], metric="loss"))
    monkeypatch.setattr(virtual, "JUDGED_EVERY", 1)
    case, steps = Case(task=TASK, sync="dense", steps=20, seed=3), []
    ended = accuracy.train(case, lambda: steps.append(1))
    assert len(steps) == 20
    assert len(ended.steps) == len(ended.values) == virtual.EVALUATIONS
    assert ended.steps[-1] == 20
    with one_thread():
        assert ended.values[-1] == pytest.approx(plain_sgd(3, 4, 20), rel=1e-4)
        assert ended.values[-1] != pytest.approx(plain_sgd(3, 2, 20), rel=1e-4)
    assert ended.values[-1] < 0.9 * ended.values[0]


def test_every_difference_between_cases_is_in_the_name_of_the_file() -> None:
    different = {
        "task": "mlp",
        "sync": "exdyna:blocks_per_partition=8",
        "treatment": "steps:every=2",
        "density": 0.0123456789,
        "bits": 0.5,
        "world": 8,
        "batch": 256,
        "rate": 0.5,
        "mixed": False,
        "seed": 1,
        "steps": 11,
    }
    near = replace(CASE, density=0.012345678)  # differs in a late digit only
    every = [CASE, near, *(replace(CASE, **{name: value}) for name, value in different.items())]
    assert set(different) == set(asdict(CASE))
    assert len({case.file for case in every}) == len(every)
    assert not any(set(case.file) & set('/:*?"<>|\\') for case in every)
    assert CASE.file == "cnn_dense_default_d1_P4_n10_s0.json"
