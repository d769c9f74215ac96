"""A pipeline for a user's optimizers: who applies momentum, what is handed over, what is written back.

There are two, one for each thing that can be exchanged: `StepAdapter` and `GradientAdapter`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from gradsieve.errors import ConfigError
from gradsieve.feedback.shared_momentum import Moments, has_moments
from gradsieve.feedback.step_length import StepLength
from gradsieve.feedback.units import flat_view
from gradsieve.feedback.velocity import MovedMomentum
from gradsieve.pipeline.base import UNIT_CAP_MB
from gradsieve.pipeline.exchange_settings import Exchange, Gradients, Steps
from gradsieve.pipeline.gradients import GradientPipeline
from gradsieve.pipeline.steps import StepPipeline
from gradsieve.schemes.base import Scheme


class OptimizerAdapter(ABC):
    """One rank's pipeline and the optimizers it works for."""

    pipeline: GradientPipeline | StepPipeline

    def __init__(self, parameters: Mapping[str, Tensor], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.parameters, self.optimizers = parameters, optimizers

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """What the programs of this step are given: flat gradients, or flat parameters."""

    def note_rate(self) -> None:
        """Note the learning rate of this step, where residuals follow it."""

    def finish(self, tensors: Mapping[str, Tensor]) -> None:
        """After the programs of all units, before the optimizer's step."""

    def before_update(self, optimizer: Any, names: Set[str]) -> None:
        """The optimizer is about to step these parameters, by gradients that are finite or none at all."""

    def after_update(self) -> None:
        """It has."""

    def at_rest(self, names: Set[str]) -> None:
        """No optimizer is stepping these parameters, of which nothing else is due: what is due in their
        states before the next step is done now, so that whoever saves them has it."""

    def give_back(self) -> None:
        """Leave the optimizers as the user made them."""

    def _refuse_sparse_gradients(self) -> None:
        for name, parameter in self.parameters.items():
            if parameter.grad is not None and parameter.grad.layout != torch.strided:
                raise ConfigError(f"parameter {name!r} has a sparse gradient: use Embedding(sparse=False)")


class StepAdapter(OptimizerAdapter):
    """The optimizers step this rank's own model, by steps as long as the mean gradient's would be and with a
    momentum that has less of this rank's own noise."""

    pipeline: StepPipeline

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        optimizers: Sequence[torch.optim.Optimizer],
        held: Mapping[str, Tensor],
        pipeline: StepPipeline,
    ) -> None:
        super().__init__(parameters, optimizers)
        self.pipeline = pipeline
        self._names = {id(parameter): name for name, parameter in held.items()}
        self._length = StepLength(pipeline.own)
        for one in optimizers:
            self._length.refuse_elsewhere(one)
        self._moments = Moments(held)
        if any(map(has_moments, optimizers)):
            pipeline.follow_others()

    def tensors(self) -> dict[str, Tensor]:
        self._refuse_sparse_gradients()
        return self.pipeline.own

    def finish(self, tensors: Mapping[str, Tensor]) -> None:
        self.pipeline.finish(tensors)

    def before_update(self, optimizer: Any, names: Set[str]) -> None:
        scale = getattr(optimizer, "grad_scale", None)  # a fused optimizer takes it off by itself
        every = {name: _flat_gradient(self.parameters[name]) for name in names}
        self.pipeline.note_gradients(every, 1.0 if scale is None else 1.0 / float(scale))
        self._length.bring_along(optimizer)
        self._moments.take_out(optimizer, self.pipeline.noise(names))
        moving = [
            [name for name in self._names_in(group) if every.get(name) is not None]
            for group in optimizer.param_groups
        ]
        self._length.begin(optimizer, moving, self.pipeline.rho, self.pipeline.gradient_size)

    def after_update(self) -> None:
        self._length.end()

    def at_rest(self, names: Set[str]) -> None:
        for optimizer in self.optimizers:
            stepped = {name for group in optimizer.param_groups for name in self._names_in(group)}
            self._moments.take_out(optimizer, self.pipeline.noise(names & stepped))

    def _names_in(self, group: Mapping[str, Any]) -> list[str]:
        return [self._names[id(each)] for each in group["params"] if id(each) in self._names]


class GradientAdapter(OptimizerAdapter):
    """The optimizers step the model that all ranks share, by the mean of what all ranks sent."""

    pipeline: GradientPipeline

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        optimizers: Sequence[torch.optim.Optimizer],
        pipeline: GradientPipeline,
        moved: MovedMomentum | None,
    ) -> None:
        super().__init__(parameters, optimizers)
        self.pipeline, self.moved = pipeline, moved
        if moved is not None:
            moved.take()

    def tensors(self) -> dict[str, Tensor]:
        self._refuse_sparse_gradients()
        self.note_rate()
        return {name: flat_view(_gradient_of(p)) for name, p in self.parameters.items()}

    def note_rate(self) -> None:
        """Schedules move all groups of parameters together: the first speaks for all."""
        self.pipeline.rate = float(self.optimizers[0].param_groups[0]["lr"])

    def give_back(self) -> None:
        if self.moved is not None:
            self.moved.give_back()


def adapt(
    parameters: Mapping[str, Tensor],
    optimizers: Sequence[torch.optim.Optimizer],
    scheme: Scheme[Any],
    settings: Exchange,
    rank: int,
    world: int,
    bucket_cap_mb: float = UNIT_CAP_MB,
    held: Mapping[str, Tensor] | None = None,
) -> OptimizerAdapter:
    """The adapter that these settings ask for. `held` is what the optimizers have, where that is not the
    parameters themselves. A lossless scheme leaves nothing behind, so that its steps are never exchanged
    unless they are several at a time."""
    if isinstance(settings, Steps) and (settings.every > 1 or not scheme.lossless):
        steps = StepPipeline(parameters.items(), scheme, rank, world, bucket_cap_mb, settings)
        return StepAdapter(parameters, optimizers, held or parameters, steps)
    moved, momentum = None, None
    plain = settings if isinstance(settings, Gradients) else Gradients()
    if plain.momentum != "optimizer" and not scheme.lossless:
        if len(optimizers) > 1:
            raise ConfigError(f"momentum can be moved out of one optimizer, not out of {len(optimizers)}")
        moved = MovedMomentum(optimizers[0])
        momentum = {name: moved.of(name, parameter) for name, parameter in parameters.items()}
    gradients = GradientPipeline(parameters.items(), scheme, rank, world, bucket_cap_mb, plain, momentum)
    return GradientAdapter(parameters, optimizers, gradients, moved)


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
