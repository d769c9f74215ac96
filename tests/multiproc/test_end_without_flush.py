"""A program that ends without flush() says what its model lacks, as the last thing it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import gradsieve
from multiproc.outside import torchrun

SCRIPT = """
import os
import signal
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import gradsieve

def main(way):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(64, 64))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    sync = gradsieve.attach(ddp, optimizer, bits=0.75)
    if way.startswith("preempted"):
        sync.heed_preemption()
        os.kill(os.getpid(), signal.SIGUSR1)
    for _ in range(8):
        optimizer.zero_grad()
        ddp(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
    if way == "flushed":
        sync.flush()
    if way.endswith("closed"):
        sync.close()
    dist.barrier()
    dist.destroy_process_group()
    if way == "failed":
        try:
            raise RuntimeError("of the user's own")
        except RuntimeError:
            sys.excepthook(*sys.exc_info())
            sys.last_value = sys.exc_info()[1]

main(sys.argv[1])
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("end") / "train.py"
    path.write_text(SCRIPT)
    return path


LINE = re.compile(
    r"rank (\d), step 8: the training ended with steps of norm [\d.e-]+ that were never exchanged and are "
    r"not in the model: call flush\(\) before that, on all ranks"
)


def test_an_end_without_flush_is_said_on_every_rank(script: Path) -> None:
    """Slow: torchrun loads torch in three new processes."""
    stderr = torchrun(script, "plain").stderr
    assert sorted(LINE.findall(stderr)) == ["0", "1"]
    assert stderr.count(f"gradsieve {gradsieve.__version__} among 2 ranks, ") == 1, "no logging was set up"


NIGHTLY = [pytest.param(way, marks=pytest.mark.nightly) for way in ("failed", "preempted")]


@pytest.mark.parametrize("way", ["flushed", *NIGHTLY])
def test_twin_not_where_nothing_is_lacking_or_it_failed_or_goes_on_elsewhere(script: Path, way: str) -> None:
    """Slow: torchrun loads torch in three new processes."""
    assert "the training ended with" not in torchrun(script, way).stderr


@pytest.mark.nightly
def test_a_close_says_what_it_leaves_unless_the_training_goes_on_elsewhere(script: Path) -> None:
    assert "close() was called with steps of norm" in torchrun(script, "closed").stderr
    assert "close() was called" not in torchrun(script, "preempted, closed").stderr
