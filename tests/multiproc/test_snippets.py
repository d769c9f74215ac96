"""Every Python block of the documentation runs, on two real ranks, or says why it cannot.

A block finds what the text around it speaks of: a model behind DDP, its optimizer, a batch, and, if it does
not make one itself, a sync that has taken a step.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradsieve
from documents import PAGES, Block, blocks
from multiproc.harness import RankFailure, Ranks

SCRIPTS = ("train.py", "measure.py")
"""Blocks that are programs of their own: tools/tests/network runs them."""
PYTHON = [
    block
    for page in PAGES
    for block in blocks(page)
    if block.language == "python" and not any(script in block.title for script in SCRIPTS)
]


def surroundings(rank: int, text: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    inputs, labels = torch.randn(16, 8), torch.randint(4, (16,))

    def loss_of(trained: nn.Module) -> torch.Tensor:
        return nn.functional.cross_entropy(trained(inputs), labels)

    names: dict[str, Any] = {
        "torch": torch,
        "nn": nn,
        "F": nn.functional,
        "dist": dist,
        "dcp": dcp,
        "gradsieve": gradsieve,
        "DistributedDataParallel": DistributedDataParallel,
        "Net": lambda: model,
        "Path": Path,
        "rank": rank,
        "model": model,
        "ddp": ddp,
        "optimizer": optimizer,
        "folder": "run/checkpoint",
        "inputs": inputs,
        "loss_of": loss_of,
    }
    if "sync = " not in text:
        names["sync"] = gradsieve.attach(ddp, optimizer, bits=0.75)
        loss_of(ddp).backward()
        optimizer.step()
        names["sync"].save("run/checkpoint")
        if rank == 0:
            torch.save(model.state_dict(), "run/model.pt")
        dist.barrier()
    return names


def execute(rank: int, text: str, folder: str) -> None:
    os.chdir(folder)
    names = surroundings(rank, text)
    exec(compile(text, "a block", "exec"), names)  # noqa: S102 - our own pages
    for value in list(names.values()):
        if isinstance(value, gradsieve.GradientSync):
            value.close()


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_blocks_of_python_run(block: Block, two: Ranks, tmp_path: Path) -> None:
    if block.reason is not None:
        pytest.skip(block.reason)
    (tmp_path / "run").mkdir()
    two.run(execute, block.text, str(tmp_path))


def test_blocks_are_found_and_most_of_them_run() -> None:
    assert len(PYTHON) > 15
    assert sum(block.reason is None for block in PYTHON) >= len(PYTHON) / 2


def test_a_block_that_fails_is_seen(two: Ranks, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with pytest.raises(RankFailure, match="no_such_call"):
        two.run(execute, "sync.no_such_call()", str(tmp_path))
