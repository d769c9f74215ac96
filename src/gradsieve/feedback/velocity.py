"""Momentum before the residual: u = m u + g on every rank, and u is what is accumulated (DGC).

Every part of a gradient then brings its momentum with it, whenever it is sent. The law: what the memories
take in, over all ranks and steps, is what momentum SGD would have applied densely; with everything sent it
is momentum SGD. Masking forgets u where an element was sent, and by that breaks the law on purpose: momentum
that grew while the element was in the residual would carry it too far.

Weight decay has to go the same way, g + decay * w, or it would lose its momentum. Memory: 2 n elements, so
that a step which is skipped leaves u as it was; the optimizer's own n are not needed meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gradsieve.errors import ConfigError
from gradsieve.feedback.units import Unit, by_slot
from gradsieve.types import Sparse


@dataclass(frozen=True, slots=True)
class Momentum:
    """SGD's settings, taken from it."""

    factor: float
    decay: float
    nesterov: bool


class MovedMomentum:
    """The optimizer without its momentum and weight decay, from `take` until they are given back."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        if not isinstance(optimizer, torch.optim.SGD):
            raise ConfigError(
                f"momentum can be moved out of torch.optim.SGD, not out of {type(optimizer).__name__}: "
                "use gradsieve.Steps, which works with every optimizer"
            )
        if any(group["dampening"] or group["maximize"] for group in optimizer.param_groups):
            raise ConfigError("momentum cannot be moved out of an SGD with dampening or maximize")
        self.optimizer = optimizer
        self._taken = [_settings(group) for group in optimizer.param_groups]
        self._of = {
            parameter: taken
            for group, taken in zip(optimizer.param_groups, self._taken, strict=True)
            for parameter in group["params"]
        }

    def take(self) -> None:
        """Out of the optimizer: last of all in a constructor, so that what fails there has not taken it."""
        for group in self.optimizer.param_groups:
            group.update(momentum=0.0, weight_decay=0.0, nesterov=False)

    def of(self, name: str, parameter: Tensor) -> Momentum:
        if parameter not in self._of:
            raise ConfigError(
                f"the optimizer does not have parameter {name!r}, whose momentum is to be moved"
            )
        return self._of[parameter]

    def give_back(self) -> None:
        for group, taken in zip(self.optimizer.param_groups, self._taken, strict=False):
            group.update(momentum=taken.factor, weight_decay=taken.decay, nesterov=taken.nesterov)


def _settings(group: dict[str, float]) -> Momentum:
    return Momentum(group["momentum"], group["weight_decay"], bool(group["nesterov"]))


class Velocity:
    """u of one unit on one rank, by parameter."""

    def __init__(
        self, unit: Unit, settings: Mapping[str, Momentum], parameters: Mapping[str, Tensor]
    ) -> None:
        self.unit, self.settings, self.parameters = unit, settings, parameters
        self.kept = {
            slot.name: torch.zeros(slot.numel, dtype=unit.dtype, device=unit.device) for slot in unit.slots
        }
        self._staged = {name: torch.empty_like(part) for name, part in self.kept.items()}

    def correct(self, gradients: Mapping[str, Tensor], scale: float, loss_scale: float) -> None:
        """g becomes what is to be accumulated; `scale` takes u to the units of the gradient."""
        for slot in self.unit.slots:
            g, own, u = gradients[slot.name], self.settings[slot.name], self._staged[slot.name]
            if own.decay:
                g.add_(self.parameters[slot.name].to(g.dtype), alpha=own.decay * loss_scale)
            torch.add(g, self.kept[slot.name], alpha=own.factor * scale, out=u)
            if own.nesterov:
                g.add_(u.to(g.dtype), alpha=own.factor)
            else:
                g.copy_(u)

    def commit(self, sent: Sparse | None) -> None:
        """Keep u; where this rank sent an element of `sent`, forget it.

        Where everything was sent, the residual was empty: that is momentum SGD, and nothing is forgotten.
        """
        self.kept, self._staged = self._staged, self.kept
        if sent is None or sent.count == sent.numel:
            return
        for slot, where, _ in by_slot(self.unit.sparse, sent):
            self.kept[slot.name][where] = 0.0

    def by_kind(self) -> dict[str, dict[str, Tensor]]:
        return {"velocity": self.kept}
