"""Rivals of the race are what their packages ship, and ranks have one model whenever they are evaluated."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradsieve_tools.bench.race import rivals
from gradsieve_tools.bench.race.rules import EVALUATE_EVERY, WARM_UP
from multiproc.harness import Ranks

STEPS = 3 * EVALUATE_EVERY


def alike_after(rank: int, name: str) -> list[int]:
    """Steps after which both ranks have the same model, to the bit."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(ddp.parameters(), 1e-2)
    sync = rivals.ATTACH[name](name, ddp, optimizer)
    source, found = torch.Generator().manual_seed(rank), []
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        ddp(torch.randn(4, 8, generator=source)).square().sum().backward()
        sync.clip_grad_norm_(1.0)
        optimizer.step()
        own = torch.cat([each.detach().flatten() for each in ddp.parameters()])
        both = [torch.empty_like(own) for _ in range(2)]
        dist.all_gather(both, own)
        if torch.equal(*both):
            found.append(step)
    return found


@pytest.mark.nightly
@pytest.mark.parametrize("name", rivals.ATTACH)
def test_one_model_at_every_evaluation(two: Ranks, name: str) -> None:
    if name == "diloco":
        pytest.importorskip("torchft")
    first, second = two.run(alike_after, name)
    assert first == second
    assert set(first) >= set(range(EVALUATE_EVERY, STEPS + 1, EVALUATE_EVERY))
    wanted = {
        "local-sgd": [*range(1, WARM_UP), *range(WARM_UP, STEPS + 1, rivals.LOCAL_EVERY)],
        "diloco": list(range(rivals.DILOCO_EVERY, STEPS + 1, rivals.DILOCO_EVERY)),
    }
    assert first == wanted.get(name, list(range(1, STEPS + 1))), "in between, only local ones are apart"
