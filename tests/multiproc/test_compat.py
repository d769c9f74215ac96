"""The table of optimizers and ways of training, in small: each way to go wrong is seen."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch.distributed as dist
from compat import Table
from compat_cells import SYNCS, Dense, Sync
from compat_optimizers import ROWS
from torch.nn.parallel import DistributedDataParallel

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


def hangs_on_one_rank(ddp: DistributedDataParallel, optimizer: Any) -> Sync:
    if dist.get_rank() == 1:
        time.sleep(60)
    return Dense(ddp, optimizer)


def test_a_hang_is_seen_and_the_next_cell_is_not_touched(two: Ranks) -> None:
    runs = Table(two, Dense, STEPS)
    assert str(runs.result(ROWS["sgd"], "plain")) == "served 1.00"
    runs.attach, runs.limit = hangs_on_one_rank, 4.0
    result = runs.result(ROWS["sgd"], "plain")
    assert result.kind == "WRONG"
    assert "rank 1 waits in hangs_on_one_rank" in str(result)
    runs.attach, runs.limit = Dense, 60.0
    assert str(runs.result(ROWS["sgd"], "plain")) == "served 1.00"
