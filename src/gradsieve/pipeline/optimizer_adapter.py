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
from gradsieve.feedback.units import flat_view
from gradsieve.optimizers import traits_of
from gradsieve.pipeline.base import UNIT_CAP_MB
from gradsieve.pipeline.exchange_settings import Exchange, Gradients, Steps
from gradsieve.pipeline.gradients import GradientPipeline
from gradsieve.pipeline.steps import StepPipeline
from gradsieve.schemes.base import Scheme
from gradsieve.step_length import StepLength


class OptimizerAdapter(ABC):
    """One rank's pipeline and the optimizers it works for."""

    pipeline: GradientPipeline | StepPipeline

    def __init__(self, parameters: Mapping[str, Tensor], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.parameters, self.optimizers = parameters, optimizers

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """What the programs of this step are given: flat gradients, or flat parameters."""

    def finish(self, tensors: Mapping[str, Tensor]) -> None:
        """After the programs of all units, before the optimizer's step."""

    def before_update(self, optimizer: Any, names: Set[str]) -> None:
        """The optimizer is about to step these parameters, by gradients that are finite or none at all."""

    def after_update(self) -> None:
        """It has."""

    def at_rest(self, names: Set[str]) -> None:
        """No optimizer is stepping these parameters, of which nothing else is due: what is due in their
        states before the next step is done now, so that whoever saves them has it."""

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
        self._length = StepLength(pipeline.own, held)
        traits = [traits_of(each, group) for each in optimizers for group in each.param_groups]
        if any(each.has_moments for each in traits):
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
        stepped = {name for name, gradient in every.items() if gradient is not None}
        pipeline = self.pipeline
        self._length.before(optimizer, stepped, pipeline.noise(names), pipeline.rho, pipeline.gradient_size)

    def after_update(self) -> None:
        self._length.after()

    def at_rest(self, names: Set[str]) -> None:
        for optimizer in self.optimizers:
            stepped = {name for group in optimizer.param_groups for name in self._length.names_in(group)}
            self._length.take_out(optimizer, self.pipeline.noise(names & stepped))


class GradientAdapter(OptimizerAdapter):
    """The optimizers step the model that all ranks share, by the mean of what all ranks sent."""

    pipeline: GradientPipeline

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        optimizers: Sequence[torch.optim.Optimizer],
        pipeline: GradientPipeline,
    ) -> None:
        super().__init__(parameters, optimizers)
        self.pipeline = pipeline

    def tensors(self) -> dict[str, Tensor]:
        self._refuse_sparse_gradients()
        return {name: flat_view(_gradient_of(p)) for name, p in self.parameters.items()}


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
    plain = settings if isinstance(settings, Gradients) else Gradients()
    gradients = GradientPipeline(parameters.items(), scheme, rank, world, bucket_cap_mb, plain)
    return GradientAdapter(parameters, optimizers, gradients)


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
