"""Real ranks agree on when to go dense, and lose nothing by it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradsieve
from multiproc.harness import Ranks

STEPS = 30


def trained(rank: int, density: float, deterministic: bool) -> tuple[list[float], bytes]:
    """The density of every step, and the model at the end."""
    torch.manual_seed(0)
    model = nn.Linear(600, 500)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    ddp = DistributedDataParallel(model)
    sync = gradsieve.attach(ddp, optimizer, density=density, deterministic=deterministic)
    random = torch.Generator().manual_seed(rank)
    seen = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        ddp(torch.randn(4, 600, generator=random)).square().sum().backward()
        optimizer.step()
        seen.append(sync.metrics()["density"])
    sync.flush()
    sync.verify()
    return seen, model.weight.detach().numpy().tobytes()


@pytest.mark.parametrize("deterministic", [False, True])
def test_dense_takes_over_at_a_high_density_and_only_if_it_may(four: Ranks, deterministic: bool) -> None:
    """Half of the elements by index and value: far more work than all of them without."""
    results = four.run(trained, 0.5, deterministic)
    assert len({str(seen) for seen, _ in results}) == 1, "ranks chose differently"
    assert len({model for _, model in results}) == 1
    seen = results[0][0]
    assert (seen.count(1.0) > STEPS // 3) != deterministic
