"""`examples/one_file.py`, which imports nothing of gradsieve, trains as gradsieve does."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradsieve
from multiproc.conftest import Pool

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))
import one_file  # noqa: E402

STEPS = 50
WIDTHS = (24, 61, 130, 8)
"""Odd, so that blocks are cut short and rows differ in length."""


def _trained(
    rank: int, attach: Callable[[DistributedDataParallel, torch.optim.AdamW], Any]
) -> tuple[list[float], Tensor]:
    """The losses of this rank, and the model in the end."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(*widths), nn.Tanh()) for widths in pairwise(WIDTHS)]
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    sync = attach(model, optimizer)
    source, losses = torch.Generator().manual_seed(rank), []
    for _ in range(STEPS):
        inputs = torch.randn(16, WIDTHS[0], generator=source)
        loss = (model(inputs) - inputs[:, : WIDTHS[-1]].sin()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    sync.flush()
    return losses, torch.cat([p.detach().flatten() for p in model.parameters()])


def _both(rank: int, density: float) -> tuple[float, float, Tensor, float]:
    """How far the losses and the models are apart; the model, and how far the losses fell."""
    theirs, model = _trained(rank, lambda ddp, adamw: one_file.Sync(ddp, adamw, density))
    settings: dict[str, Any] = {"scheme": "stripes", "density": density}
    ours, same = _trained(rank, lambda ddp, adamw: gradsieve.attach(ddp, adamw, **settings))
    apart = max(abs(one - other) for one, other in zip(theirs, ours, strict=True))
    return apart, float((model - same).abs().max()), model, ours[-1] / ours[0]


@pytest.mark.parametrize("density", [0.3, 0.05])
@pytest.mark.parametrize("world", [2, 3])
def test_one_file_trains_as_the_library_does(pool: Pool, world: int, density: float) -> None:
    answers = pool(world).run(_both, density)
    for losses_apart, models_apart, model, left in answers:
        assert losses_apart < 1e-6
        assert models_apart < 1e-6
        assert torch.equal(model, answers[0][2]), "replicas differ"
        assert left < 0.9, "nothing was learnt, so that nothing was compared"


def test_it_needs_nothing_of_gradsieve() -> None:
    text = (EXAMPLES / "one_file.py").read_text()
    assert "import gradsieve" not in text
    assert "from gradsieve" not in text
