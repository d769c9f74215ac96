"""Recorded gradients are those of a real training, in the pipeline's order, and the same in every run."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from gradsieve.units import make_units
from gradsieve_tools.bench.common import models
from gradsieve_tools.bench.common.models import Task
from gradsieve_tools.bench.common.recordings import record


def small(model: str) -> Task:
    torch.manual_seed(0)
    if model == "transformer":
        return models.transformer(width=16, layers=1, context=8, batch=8, most_bytes=60_000)
    return models.recommender(width=4, items=500, batch=128, most_bytes=60_000)


@pytest.mark.parametrize("model", ["transformer", "recommender"])
def test_a_recording_is_a_training_and_repeats_bit_by_bit(model: str) -> None:
    task = small(model)
    made = [record(deepcopy(task), 2, 8, warm=12, seed=seed) for seed in (1, 1, 2)]
    assert made[0].gradients.shape == (8, 2, task.n)
    assert sum(made[0].sizes) == made[0].n == task.n
    assert torch.equal(made[0].gradients, made[1].gradients)
    assert not torch.equal(made[0].gradients, made[2].gradients)
    assert not torch.equal(made[0].gradients[:, 0], made[0].gradients[:, 1])
    assert made[0].gradients.isfinite().all()
    losses = made[0].losses
    assert len(losses) == 20
    assert sum(losses[-5:]) < sum(losses[:5])


def line(world: int, examples: int = 12) -> Task:
    """Two layers whose gradients are easily had; input i is the i-th unit vector, so that its use shows."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(examples, 3), nn.Linear(3, 2))
    return Task(model, (torch.eye(examples),), torch.ones(examples, 2), mse_loss, batch=world, rate=0.5)


def test_gradients_lie_in_the_order_of_the_pipelines_units() -> None:
    task = line(1)
    before = [parameter.detach().clone() for parameter in task.model.parameters()]
    made = record(task, 1, 1, warm=0)
    (unit,) = make_units(task.model.named_parameters(), cap_bytes=1 << 30, small=0)
    assert made.sizes == unit.sizes == [2, 6, 3, 36]
    # The model moved by the mean gradient, which is the only rank's: what it moved by is what was recorded.
    moved = [(old - new) / task.rate for old, new in zip(before, task.model.parameters(), strict=True)]
    recorded = made.gradients[0, 0].split(made.sizes)
    for mine, parameter in zip(recorded, reversed(moved), strict=True):
        torch.testing.assert_close(mine, parameter.flatten())


def test_every_rank_has_its_own_part_of_the_examples() -> None:
    made = record(line(3), 3, 10, warm=0)
    first_layer = made.gradients[..., -36:].view(10, 3, 3, 12)
    used = first_layer.abs().sum((0, 2)) > 0
    for rank in range(3):
        assert {index % 3 for index in used[rank].nonzero().flatten().tolist()} == {rank}
