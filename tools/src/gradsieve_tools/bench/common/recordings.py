"""Gradients of P ranks, recorded from a real training run in one process.

    every step:  each rank's gradient of its own batch -> kept -> model -= rate * mean over ranks

The model moves by the dense mean, so that every scheme is shown the same gradients afterwards: what a scheme
would do to the training is not in them. Steps before the first kept one take the model away from its random
start, where gradients are not yet like those of a training.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gradsieve import units
from gradsieve_tools.bench.common.models import Task

WARM_STEPS = 40


@dataclass(frozen=True, slots=True)
class Recording:
    sizes: list[int]  # elements of each tensor, in the order of the units: the backward's
    gradients: Tensor  # (steps, world, n)
    losses: list[float]  # mean over ranks in every step, the warm-up's included

    @property
    def n(self) -> int:
        return sum(self.sizes)


def record(
    task: Task,
    world: int,
    steps: int,
    *,
    warm: int = WARM_STEPS,
    seed: int = 0,
    after_step: Callable[[int], None] = lambda taken: None,
) -> Recording:
    """Train `task.model`, which is changed by it, and keep the gradients of the last `steps` steps."""
    parameters = dict(task.model.named_parameters())
    (unit,) = units.make_units(parameters.items(), cap_bytes=sys.maxsize, small=0)
    random = torch.Generator().manual_seed(seed)
    gradients = torch.empty(steps, world, unit.n, dtype=unit.dtype, device=unit.device)
    losses = []
    for step in range(-warm, steps):
        kept = gradients[step] if step >= 0 else gradients.new_empty(world, unit.n)
        each = [_gradient(task, rank, world, random, unit, out=kept[rank]) for rank in range(world)]
        losses.append(sum(each) / world)
        _descend(parameters, unit, kept.mean(0), task.rate)
        after_step(warm + step + 1)
    return Recording(unit.sizes, gradients, losses)


def _gradient(
    task: Task, rank: int, world: int, random: torch.Generator, unit: units.Unit, out: Tensor
) -> float:
    """The gradient of one rank's next batch, written to `out`; its loss. Rank r owns every P-th example."""
    owned = len(range(rank, len(task.target), world))
    drawn = torch.randint(owned, (task.batch,), dtype=torch.int64, device=random.device, generator=random)
    picked = rank + world * drawn
    parameters = dict(task.model.named_parameters())
    loss = task.loss(task.model(*(each[picked] for each in task.inputs)), task.target[picked])
    found = torch.autograd.grad(loss, [parameters[slot.name] for slot in unit.slots])
    torch.cat([units.flat_view(gradient.contiguous()) for gradient in found], out=out)
    return loss.item()


def _descend(parameters: dict[str, nn.Parameter], unit: units.Unit, mean: Tensor, rate: float) -> None:
    with torch.no_grad():
        for slot in unit.slots:
            parameter = parameters[slot.name]
            parameter.sub_(units.shaped_like(mean[slot.start : slot.stop], parameter), alpha=rate)
