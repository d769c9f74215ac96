"""A pipeline fitted to an optimizer: who applies momentum, what is handed over, what is written back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from gradsieve.errors import ConfigError
from gradsieve.feedback.step_length import StepLength
from gradsieve.feedback.treatment import Treatment
from gradsieve.feedback.units import flat_view
from gradsieve.feedback.velocity import MovedMomentum
from gradsieve.schemes.base import Scheme
from gradsieve.sync.base import UNIT_CAP_MB
from gradsieve.sync.gradients import GradientPipeline
from gradsieve.sync.steps import StepPipeline


class Fitted:
    """One rank's pipeline and the optimizer it works for."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        optimizers: Sequence[torch.optim.Optimizer],
        scheme: Scheme[Any],
        treatment: Treatment,
        rank: int,
        world: int,
        bucket_cap_mb: float = UNIT_CAP_MB,
        held: Mapping[str, Tensor] | None = None,
    ) -> None:
        """`held` is what the optimizers have, where that is not the parameters themselves."""
        self.parameters, self.optimizers = parameters, optimizers
        self._names = {id(parameter): name for name, parameter in (held or parameters).items()}
        self.moved: MovedMomentum | None = None
        self._length = StepLength({})
        self.pipeline: GradientPipeline | StepPipeline
        if treatment.exchange == "steps" and (treatment.every > 1 or not scheme.lossless):
            self.pipeline = StepPipeline(parameters.items(), scheme, rank, world, bucket_cap_mb, treatment)
            self._length = StepLength(self.pipeline.own)
            for one in optimizers:
                self._length.refuse_elsewhere(one)
            return
        momentum = None
        if treatment.momentum != "optimizer" and not scheme.lossless:
            if len(optimizers) > 1:
                raise ConfigError(f"momentum can be moved out of one optimizer, not out of {len(optimizers)}")
            self.moved = MovedMomentum(optimizers[0])
            momentum = {name: self.moved.of(name, parameter) for name, parameter in parameters.items()}
        self.pipeline = GradientPipeline(
            parameters.items(), scheme, rank, world, bucket_cap_mb, treatment, momentum
        )
        if self.moved is not None:
            self.moved.take()

    def tensors(self) -> dict[str, Tensor]:
        """What the programs of this step are given: flat gradients, or flat parameters."""
        for name, parameter in self.parameters.items():
            if parameter.grad is not None and parameter.grad.layout != torch.strided:
                raise ConfigError(f"parameter {name!r} has a sparse gradient: use Embedding(sparse=False)")
        if isinstance(self.pipeline, StepPipeline):
            return self.pipeline.own
        self.note_rate()
        return {name: flat_view(_gradient_of(p)) for name, p in self.parameters.items()}

    def note_rate(self) -> None:
        """Of this step. Schedules move all groups of parameters together: the first speaks for all."""
        if isinstance(self.pipeline, GradientPipeline):
            self.pipeline.rate = float(self.optimizers[0].param_groups[0]["lr"])

    def finish(self, tensors: Mapping[str, Tensor]) -> None:
        """After the programs of all units, before the optimizer's step."""
        if isinstance(self.pipeline, StepPipeline):
            self.pipeline.finish(tensors)

    def before_update(self, optimizer: Any, names: Set[str]) -> None:
        """The optimizer is about to step these parameters, by gradients that are finite or none at all."""
        if not isinstance(self.pipeline, StepPipeline):
            return
        scale = getattr(optimizer, "grad_scale", None)  # a fused optimizer takes it off by itself
        every = {name: _flat_gradient(self.parameters[name]) for name in names}
        self.pipeline.note_gradients(every, 1.0 if scale is None else 1.0 / float(scale))
        self._length.bring_along(optimizer)
        moving = [
            [name for name in self._names_in(group) if every.get(name) is not None]
            for group in optimizer.param_groups
        ]
        self._length.begin(optimizer, moving, self.pipeline.rho, self.pipeline.gradient_size)

    def _names_in(self, group: Mapping[str, Any]) -> list[str]:
        return [self._names[id(each)] for each in group["params"] if id(each) in self._names]

    def after_update(self) -> None:
        self._length.end()

    def give_back(self) -> None:
        """The optimizer as the user made it."""
        if self.moved is not None:
            self.moved.give_back()


def _flat_gradient(parameter: Tensor) -> Tensor | None:
    """`.grad` in the order in which the parameter's elements lie in memory; an expanded or transposed one is
    copied, a sparse one refused."""
    gradient = parameter.grad
    if gradient is None:
        return None
    if gradient.layout != torch.strided:
        raise ConfigError("a parameter has a sparse gradient: use Embedding(sparse=False)")
    if gradient.stride() != parameter.stride():
        gradient = torch.empty_like(parameter).copy_(gradient)
    return flat_view(gradient)


def _gradient_of(parameter: Tensor) -> Tensor:
    """`.grad`, made to lie in memory as the parameter does."""
    gradient = parameter.grad
    if gradient is None:
        parameter.grad = gradient = torch.zeros_like(parameter)
    if gradient.stride() != parameter.stride():
        parameter.grad = gradient = torch.empty_like(parameter).copy_(gradient)
    return gradient
