"""The table of optimizers and ways of training, in small: each way to go wrong is seen."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from compat import Fault, Record, Result, Table, page, table
from compat_cells import SYNCS, Dense, Sync
from compat_optimizers import ROWS
from gradsieve.errors import ConfigError
from multiproc.harness import Ranks

STEPS = 60


@pytest.fixture(scope="module")
def served(two: Ranks) -> Table:
    return Table(two, SYNCS["gradsieve"], STEPS)


@pytest.mark.parametrize("row", ["sgd", "sgd-nesterov", "asgd"])
@pytest.mark.parametrize("cell", ["plain", "resume"])
def test_optimizers_are_served(served: Table, row: str, cell: str) -> None:
    result = served.result(ROWS[row], cell)
    assert result.kind == "served", result


@pytest.mark.parametrize("cell", ["plain", "ema"])
def test_ranks_that_exchange_nothing_are_wrong(two: Ranks, cell: str) -> None:
    result = Table(two, SYNCS["alone"], STEPS).result(ROWS["sgd"], cell)
    wrong = {fault.what for fault in result.reasons}
    assert result.kind == "WRONG"
    assert {"ranks differ in parameters", "the loss is more than 1.15 times that of plain DDP"} <= wrong
    assert ("ranks differ in averages taken after the step" in wrong) == (cell == "ema")


def changes_the_rate_for_a_while(ddp: DistributedDataParallel, optimizer: Any) -> Sync:
    """From the step's begin until hooks that were made before this one have run."""

    def scale(by: float) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= by

    optimizer.register_step_pre_hook(lambda *_: scale(0.5))
    optimizer.register_step_post_hook(lambda *_: scale(2.0))
    return Dense(ddp, optimizer)


def test_a_rate_that_only_a_hook_sees_is_wrong(two: Ranks) -> None:
    result = Table(two, changes_the_rate_for_a_while, STEPS).result(ROWS["sgd"], "plain")
    assert "in a step hook made before attach lr is changed (1.0 for 2.0 in step 0)" in str(result)


class Forgetful(Dense):
    """Of what the optimizer remembers nothing is saved."""

    def load(self, folder: Any) -> None: ...


def test_a_training_that_resumes_without_its_momentum_is_wrong(two: Ranks) -> None:
    result = Table(two, Forgetful, STEPS).result(ROWS["sgd-nesterov"], "resume")
    assert "the resumed training ends in other bits" in str(result)


def refuses(ddp: DistributedDataParallel, optimizer: Any) -> Sync:
    raise ConfigError("planted: this optimizer cannot be served")


def fails_on_one_rank(ddp: DistributedDataParallel, optimizer: Any) -> Sync:
    if dist.get_rank() == 1:
        raise ConfigError("planted: on one rank")
    return Dense(ddp, optimizer)


def hangs_on_one_rank(ddp: DistributedDataParallel, optimizer: Any) -> Sync:
    if dist.get_rank() == 1:
        time.sleep(60)
    return Dense(ddp, optimizer)


def test_a_refusal_by_all_is_no_fault_and_by_one_it_is(two: Ranks) -> None:
    result = Table(two, refuses, STEPS).result(ROWS["sgd"], "plain")
    assert str(result) == "refused: planted: this optimizer cannot be served"
    result = Table(two, fails_on_one_rank, STEPS).result(ROWS["sgd"], "plain")
    assert str(result) == "WRONG: rank 1: ConfigError: planted: on one rank"


def test_a_hang_is_seen_and_the_next_cell_is_not_touched(two: Ranks) -> None:
    runs = Table(two, Dense, STEPS)
    assert str(runs.result(ROWS["sgd"], "plain")) == "served 1.00"
    runs.attach, runs.limit = hangs_on_one_rank, 4.0
    result = runs.result(ROWS["sgd"], "plain")
    assert result.kind == "WRONG"
    assert "rank 1 waits in hangs_on_one_rank" in str(result)
    runs.attach, runs.limit = Dense, 60.0
    assert str(runs.result(ROWS["sgd"], "plain")) == "served 1.00"


def test_what_plain_ddp_cannot_do_or_nobody_installed_is_said(two: Ranks) -> None:
    runs = Table(two, Dense, STEPS)
    assert "no dense: AssertionError: If capturable=True" in str(
        runs.result(ROWS["adamw-capturable"], "plain")
    )
    missing = replace(ROWS["lion"], package="no-such-package")
    assert str(runs.result(missing, "plain")) == "not installed"


def test_the_page_has_the_table_and_the_reasons() -> None:
    results = [Result("sgd", "plain", "served", ratio=1.0), Result("lbfgs", "plain", "refused")]
    assert "| sgd | 1.00 |\n| lbfgs | refused |" in table(results, ["plain"])
    text = " ".join(page(results, ["plain"], "python tests/compat.py", 60.0, STEPS).split())
    assert "`python tests/compat.py`" in text
    assert "1 served, 1 refused." in text


def test_a_table_that_was_broken_off_can_be_gone_on_with(tmp_path: Path) -> None:
    result = Result("sgd", "plain", "WRONG", [Fault("planted", "1 of 2")], ratio=1.5)
    Record("first", STEPS, tmp_path / "first.json").add(result)
    second = Record("second", STEPS, None)
    second.take(tmp_path / "first.json")
    assert second.known == {("sgd", "plain"): result}
    with pytest.raises(SystemExit, match="is of 60 steps"):
        Record("third", STEPS + 1, None).take(tmp_path / "first.json")
    other = replace(second, versions={**second.versions, "gradsieve": "of another source"})
    with pytest.raises(SystemExit, match="cannot be gone on with"):
        other.take(tmp_path / "first.json")
    with pytest.raises(SystemExit, match="was changed while it was measured"):
        other.add(result)
