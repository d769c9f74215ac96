"""What a rival is to `gradsieve bench accuracy`: its settings, and one rank's part in it.

    begin    on every rank, with that rank's model and optimizer
    step     after backward: the rank's step, and whatever its ranks then exchange
    finish   after the last step: whatever it takes until all ranks have one model

A part asks for communication as schemes do, so that virtual ranks run it and bytes are counted the same way.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn

from gradsieve.errors import ConfigError
from gradsieve.schemes import AllReduce, Ctx, Program, Stripes, Values
from gradsieve_tools.bench.tasks.training import Training

Shapes: TypeAlias = Sequence[Sequence[int]]


class Part(ABC):
    def __init__(self, training: Training, ctx: Ctx) -> None:
        self.training, self.rank, self.world = training, ctx.rank, ctx.world

    @abstractmethod
    def step(self, number: int) -> Program[None]:
        """Counted from 1."""

    @abstractmethod
    def finish(self) -> Program[None]: ...

    def take_step(self) -> None:
        self.training.optimizer.step()
        self.training.schedule.step()


@dataclass(frozen=True, slots=True)
class Rival(ABC):
    # why the model at the end lacks a part of the ranks' steps; empty: it lacks none
    loses: ClassVar[str] = ""

    @abstractmethod
    def begin(self, training: Training, ctx: Ctx) -> Part: ...


@dataclass(frozen=True, slots=True)
class RivalRun:
    task: str
    rival: Any  # a `Rival`, one of torch's hooks, or torchft's
    seed: int
    world: int
    steps: int
    mixed: bool = True
    batch: int | None = None
    rate: float = 1.0  # times the task's learning rate


def elements(shapes: Shapes) -> int:
    return sum(map(math.prod, shapes))


def all_reduce_bytes(size: float, world: int) -> float:
    """Moved by a rank, as `comm/ops.py` counts them."""
    return 2 * size * (world - 1) / world


def at_least(least: float, **settings: float) -> None:
    for name, value in settings.items():
        if not value >= least:
            raise ConfigError(f"{name} is {least:g} or more, not {value!r}")


def flat(model: nn.Module) -> Tensor:
    """A copy of all parameters, end to end."""
    return nn.utils.parameters_to_vector(model.parameters()).detach()


@torch.no_grad()
def write(model: nn.Module, values: Tensor) -> None:
    """The reverse. Into the parameters' own memory: optimizers and views keep theirs."""
    start = 0
    for parameter in model.parameters():
        stop = start + parameter.numel()
        parameter.copy_(values[start:stop].view_as(parameter))
        start = stop


def mean(values: Tensor, world: int) -> Program[Tensor]:
    total = yield AllReduce(values.clone())
    return total / world


def rounded_mean(values: Tensor, kind: Values, ctx: Ctx) -> Program[tuple[Tensor, Tensor]]:
    """The mean in few bits, there and back by way of owners; and what rounding left with this rank, of its
    own values and of the sums that it owns."""
    scheme = Stripes(density=1.0, values=kind)
    outcome = yield from scheme.step(values, scheme.begin(values.numel(), ctx.world), ctx)
    return outcome.update.to_dense() / ctx.world, values - outcome.spent.to_dense()
