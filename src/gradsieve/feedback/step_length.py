"""How long the steps of an adaptive optimizer are where every rank takes its own.

Adam divides by the root of the mean square of its gradients. A rank's own gradient has the noise of its own
batch in it, which the mean over ranks, that a dense training would divide by, has not:

    rho = |mean g|^2 / mean over ranks of |g_r|^2        1/P where noise rules, 1 where ranks agree

So the mean of the ranks' steps makes sqrt(rho) of the way that a dense step makes, also where all of it is
exchanged. The mend: such steps are taken 1/sqrt(rho) as long. The learning rate is raised by that for the
time of the step, and decoupled weight decay, which does not divide by anything, lowered by as much.

Which optimizers normalise is found out by a trial, group by group: a copy of the optimizer steps a few
made-up elements, with gradients of one length and with gradients ten times as long.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_log = logging.getLogger("gradsieve")

_TRIAL_STEPS = 12
"""RAdam does not normalise in its first five."""
_TRIAL_RATE, _TRIAL_DECAY = 1e-3, 0.1
_LONGER = 10.0
_SIDE = 4
"""Elements along each dimension of the made-up parameter."""


@dataclass(frozen=True, slots=True)
class Habit:
    """What an optimizer does with the parameters of one group."""

    normalises: bool
    """Its steps are as long whatever the length of its gradients; and twice as long at twice the rate."""
    decays_apart: bool = False
    """Weight decay is not normalised: rate * decay * parameter is taken off."""


class StepLength:
    """The steps of all optimizers of a run, made longer while they are taken."""

    def __init__(self) -> None:
        self._habits: weakref.WeakKeyDictionary[Any, list[Habit]] = weakref.WeakKeyDictionary()
        self._changed: list[tuple[dict[str, Any], str, Any, Any]] = []
        """Group and setting; its value before and the one we put there."""

    def begin(self, optimizer: Any, factor: float) -> None:
        """The step that comes now is to be so many times as long."""
        self.end()
        if factor == 1.0:
            return
        for group, habit in zip(optimizer.param_groups, self.habits(optimizer), strict=True):
            if habit.normalises:
                self._set(group, "lr", group["lr"] * factor)
            if habit.normalises and habit.decays_apart:
                self._set(group, "weight_decay", group["weight_decay"] / factor)

    def end(self) -> None:
        """It was taken, or broke off: the user's settings, but for what the user has set since."""
        for group, setting, before, ours in self._changed:
            if group.get(setting) is ours:
                group[setting] = before
        self._changed = []

    def habits(self, optimizer: Any) -> list[Habit]:
        """By group; tried out when they are first asked for."""
        known = self._habits.get(optimizer, [])
        if len(known) != len(optimizer.param_groups):
            known = [habit_of(optimizer, group) for group in optimizer.param_groups]
            self._habits[optimizer] = known
        return known

    def _set(self, group: dict[str, Any], setting: str, value: Any) -> None:
        self._changed.append((group, setting, group[setting], value))
        group[setting] = value


def habit_of(optimizer: Any, group: Mapping[str, Any]) -> Habit:
    """By trial. An optimizer that cannot be tried is left as it is."""
    if isinstance(optimizer, torch.optim.SGD) or not group["params"] or group.get("lr") is None:
        return Habit(False)
    try:
        with torch.enable_grad():
            return _tried(optimizer, group)
    except Exception as error:
        _log.warning(
            "%s could not be tried out (%s: %s), so that its steps are left as long as they are: if it "
            "divides by the size of its gradients, models learn more slowly than with plain DDP",
            type(optimizer).__name__,
            type(error).__name__,
            error,
        )
        return Habit(False)


def _tried(optimizer: Any, group: Mapping[str, Any]) -> Habit:
    shape = (_SIDE,) * group["params"][0].dim()
    source = torch.Generator().manual_seed(0)
    gradients = [_noise(shape, source) for _ in range(_TRIAL_STEPS)]
    decays = "weight_decay" in group

    def last_step(scale: float, rate: float, decay: float) -> tuple[Tensor, Tensor]:
        settings = {"lr": rate} | ({"weight_decay": decay} if decays else {})
        return _last_step(optimizer, {**group, **settings}, [scale * each for each in gradients])

    plain, start = last_step(1.0, _TRIAL_RATE, 0.0)
    longer, _ = last_step(_LONGER, _TRIAL_RATE, 0.0)
    faster, _ = last_step(1.0, 2 * _TRIAL_RATE, 0.0)
    length = float(plain.norm())
    normalises = 0.0 < float(longer.norm()) < math.sqrt(_LONGER) * length
    follows = 1.6 * length < float(faster.norm()) < 2.4 * length
    if normalises and not follows:
        _log.warning(
            "%s: its steps do not follow its rate, so that they are left as long as they are",
            type(optimizer).__name__,
        )
    if not (normalises and follows and decays):
        return Habit(normalises and follows)
    moved, start = last_step(0.0, _TRIAL_RATE, _TRIAL_DECAY)
    apart = -_TRIAL_RATE * _TRIAL_DECAY * start
    return Habit(True, float((moved - apart).norm()) < 0.01 * float(apart.norm()))


def _last_step(optimizer: Any, group: Mapping[str, Any], gradients: list[Tensor]) -> tuple[Tensor, Tensor]:
    """How far a copy of the optimizer moves a made-up parameter in the last of some steps, and from where."""
    like = group["params"][0]
    start = torch.linspace(0.5, 1.5, gradients[0].numel(), dtype=torch.float32, device=like.device)
    parameter = torch.nn.Parameter(start.view_as(gradients[0]))
    copy = object.__new__(type(optimizer))
    own = {name: value for name, value in vars(optimizer).items() if not _is_hook(name, value)}
    groups = [{**group, "params": [parameter]}]
    copy.__setstate__({**own, "state": defaultdict(dict), "param_groups": groups})
    before = start
    for gradient in gradients:
        before = parameter.detach().clone()
        parameter.grad = gradient.to(like.device)
        copy.step()
    return (parameter.detach() - before).cpu(), before.cpu()


def _is_hook(name: str, value: Any) -> bool:
    """Somebody else's: hooks, and a step that a schedule has wrapped."""
    return name.endswith("_hooks") or isinstance(value, Callable)  # type: ignore[arg-type]


def _noise(shape: tuple[int, ...], source: torch.Generator) -> Tensor:
    return torch.randn(shape, dtype=torch.float32, device="cpu", generator=source)
