"""How long the steps of an adaptive optimizer are where every rank takes its own.

Adam divides by the root of the mean square of its gradients. A rank's own gradient has the noise of its own
batch in it, which the mean over ranks, that a dense training would divide by, has not:

    rho = |mean g|^2 / mean over ranks of |g_r|^2        1/P where noise rules, 1 where ranks agree

So the mean of the ranks' steps makes sqrt(rho) of the way that a dense step makes, also where all of it is
exchanged. The fix: such steps are made 1/sqrt(rho) as long. The optimizer and its settings are not touched:
once it has moved the parameters, what it moved them by is made longer. Decoupled weight decay, which divides
by nothing, is left out of that:

    x = x_before - c x_before + f (x_after - x_before + c x_before),    c = rate * decay

A parameter belongs to one sync, so that there is one owner of its step's length, however many optimizers,
syncs and schedules there are. Memory: n elements, in the parameters' type, for those that are lengthened.

What an optimizer does (`Habit`) is found out by trial, group by group: a copy of it steps a few made-up
elements. Gradients in the trial are as large as the real ones, by what all ranks saw of them, so that all
ranks find the same: Adam whose eps is far above its gradients steps as SGD does.
"""

from __future__ import annotations

import copy
import logging
import math
import weakref
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradsieve.errors import ConfigError
from gradsieve.torch_names import copy_all, lerp_all, plain_part_of, scale_all, step_without_hooks, uncompiled

_log = logging.getLogger("gradsieve")

_TRIAL_STEPS = 12
"""RAdam does not normalise in its first five; Lookahead pulls parameters back every five or six."""
_TRIAL_RATE, _TRIAL_DECAY = 1e-3, 0.1
_LONGER = 10.0
_SIDE = 4
"""Elements along each dimension of the made-up parameter."""
_PUSH = 0.5
"""By which a parameter is moved between two steps of a trial."""
_SIZES = 16.0
"""Sizes of gradients are rounded to powers of this: a trial is made once for each."""
_OF_A_SCALER = frozenset({"grad_scale", "found_inf"})
"""What a GradScaler gives a fused optimizer for the time of a step: not for a trial's steps."""


@dataclass(frozen=True, slots=True)
class Habit:
    """What an optimizer does with the parameters of one group."""

    elasticity: float = 1.0
    """The power of its gradients' length that the length of its steps follows: 1 for SGD, 0 for Adam."""
    decays_apart: bool = False
    """Weight decay is not normalised: rate * decay * parameter is taken off."""

    def factor(self, rho: float) -> float:
        """How much longer its steps have to be."""
        return float(rho ** (-(1.0 - self.elasticity) / 2))


@dataclass(frozen=True, slots=True)
class Lengthened:
    """Parameters of one group, as they were before the step that is being taken."""

    group: Mapping[str, Any]
    habit: Habit
    factor: float
    own: list[Tensor]
    before: list[Tensor]


class StepLength:
    """Of all optimizers that step the parameters of one sync."""

    def __init__(self, own: Mapping[str, Tensor]) -> None:
        """`own`: flat, by name, the memory in which optimizers find the parameters."""
        self._own = own
        self._kept: dict[str, Tensor] = {}
        self._open: list[Lengthened] = []
        self._habits: weakref.WeakKeyDictionary[Any, dict[Any, Habit]] = weakref.WeakKeyDictionary()
        self._copies: weakref.WeakKeyDictionary[Any, dict[Any, tuple[str, ...]]] = weakref.WeakKeyDictionary()

    def begin(self, optimizer: Any, names: Sequence[Sequence[str]], rho: float, size: float) -> None:
        """The optimizer is about to step these parameters, listed group by group, of gradients of this size
        (root mean square; 0: not known)."""
        self._open = []
        if rho >= 1.0 or _is_called_off(optimizer):
            return
        for group, here in zip(optimizer.param_groups, names, strict=True):
            habit = self.habit(optimizer, group, size) if here else Habit()
            if (factor := habit.factor(rho)) == 1.0:
                continue
            own = [self._own[name] for name in here]
            before = [self._room(name) for name in here]
            copy_all(before, own)
            self._open.append(Lengthened(group, habit, factor, own, before))

    def end(self) -> None:
        """It has stepped."""
        for each in self._open:
            if each.habit.decays_apart:
                scale_all(each.before, 1.0 - float(each.group["lr"]) * float(each.group["weight_decay"]))
            lerp_all(each.own, each.before, 1.0 - each.factor)
        self._open = []

    def _room(self, name: str) -> Tensor:
        if name not in self._kept:
            self._kept[name] = torch.empty_like(self._own[name])
        return self._kept[name]

    def habit(self, optimizer: Any, group: Mapping[str, Any], size: float) -> Habit:
        """Tried out when it is first asked for; where a trial showed nothing, again at other sizes."""
        if isinstance(optimizer, torch.optim.SGD) or not group["params"] or not size > 0.0:
            return Habit()
        power = round(math.log(size, _SIZES))
        known = self._habits.setdefault(optimizer, {})
        key = power, kind_of(group)
        if key not in known:
            known[key] = habit_of(optimizer, group, _SIZES**power) or Habit()
        return known[key]

    # -- optimizers with a copy of the weights ----------------------------------------------------------

    def refuse_elsewhere(self, optimizer: Any) -> None:
        """Raise where an optimizer keeps the weights where nobody else can write them."""
        for group in optimizer.param_groups:
            self._copies_in(optimizer, group)

    def bring_along(self, optimizer: Any) -> None:
        """The parameters were written: the optimizer's own copies of them, if it has any, follow."""
        for group in optimizer.param_groups:
            for key in self._copies_in(optimizer, group):
                for parameter in group["params"]:
                    _follow(optimizer.state.get(parameter, {}).get(key), parameter.detach())

    def _copies_in(self, optimizer: Any, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Under which keys of its state."""
        if not group["params"] or type(optimizer).__module__.startswith("torch.optim."):
            return ()
        known = self._copies.setdefault(optimizer, {})
        key = group["params"][0].dtype, kind_of(group)
        if key not in known:
            known[key] = copies_of(optimizer, group)
        return known[key]


def habit_of(optimizer: Any, group: Mapping[str, Any], size: float) -> Habit | None:
    """By trial, with gradients of this size. None where it showed nothing."""
    try:
        with torch.enable_grad():
            return _tried(optimizer, group, size)
    except Exception as error:
        _log.warning(
            "%s could not be tried out (%s: %s), so that its steps are left as long as they are: if it "
            "divides by the size of its gradients, models learn more slowly than with plain DDP",
            type(optimizer).__name__,
            type(error).__name__,
            error,
        )
        return None


def copies_of(optimizer: Any, group: Mapping[str, Any]) -> tuple[str, ...]:
    """Keys of the optimizer's state under which it keeps the weights, found by moving a parameter between two
    steps: does the move survive? Raises where it does not even if what looks like a copy follows."""
    try:
        with torch.enable_grad():
            if _survives(optimizer, group, ()):
                return ()
            keys = _alike_in_state(optimizer, group)
            if keys and _survives(optimizer, group, keys):
                return keys
    except Exception as error:
        _log.warning(
            "%s could not be tried out (%s: %s): if it keeps a copy of the weights, what other ranks send "
            "will be undone by its steps; compare a short training with plain DDP's",
            type(optimizer).__name__,
            type(error).__name__,
            error,
        )
        return ()
    raise ConfigError(
        f"{type(optimizer).__name__} computes the parameters from weights that it keeps elsewhere, so that "
        "its next step would undo what other ranks sent: use "
        "exchange=gradsieve.Gradients(), with which all ranks take the same step"
    )


def _tried(optimizer: Any, group: Mapping[str, Any], size: float) -> Habit | None:
    source = torch.Generator().manual_seed(0)
    gradients = [size * _noise(group, source) for _ in range(_TRIAL_STEPS)]
    decays = "weight_decay" in group

    def last_step(scale: float, decay: float) -> tuple[Tensor, Tensor]:
        trial = Trial(optimizer, {**group, **({"weight_decay": decay} if decays else {})}, torch.float32)
        before = trial.parameter.detach().clone()
        for gradient in gradients:
            before = trial.parameter.detach().clone()
            trial.step(scale * gradient)
        return (trial.parameter.detach() - before).cpu(), before.cpu()

    plain, longer = (float(last_step(scale, 0.0)[0].norm()) for scale in (1.0, _LONGER))
    if not (0.0 < plain < math.inf and 0.0 < longer < math.inf):
        return None
    elasticity = round(min(max(math.log(longer / plain, _LONGER), 0.0), 1.0), 2)
    if elasticity == 1.0 or not decays:
        return Habit(elasticity)
    moved, start = last_step(0.0, _TRIAL_DECAY)
    apart = -_TRIAL_RATE * _TRIAL_DECAY * start
    return Habit(elasticity, float((moved - apart).norm()) < 0.01 * float(apart.norm()))


def _survives(optimizer: Any, group: Mapping[str, Any], following: Iterable[str]) -> bool:
    """Whether a parameter that was moved after a first step is still moved after some more."""
    ends = []
    for push in (0.0, _PUSH):
        source = torch.Generator().manual_seed(0)
        trial = Trial(optimizer, group, group["params"][0].dtype)
        for number in range(_TRIAL_STEPS):
            trial.step(_noise(group, source))
            if number == 0:
                trial.parameter.detach().add_(push)
            for key in following:
                _follow(trial.state.get(key), trial.parameter.detach())
        ends.append(trial.parameter.detach().double().mean())
    return abs(float(ends[1] - ends[0]) - _PUSH) < 0.1 * _PUSH


def _alike_in_state(optimizer: Any, group: Mapping[str, Any]) -> tuple[str, ...]:
    """Keys of what is the parameter after every step, but for rounding to its type."""
    source = torch.Generator().manual_seed(0)
    trial = Trial(optimizer, group, group["params"][0].dtype)
    found: set[str] | None = None
    for _ in range(_TRIAL_STEPS):
        trial.step(_noise(group, source))
        own = trial.parameter.detach()
        alike = {
            key
            for key, each in trial.state.items()
            if isinstance(each, Tensor) and each.shape == own.shape and torch.equal(each.to(own.dtype), own)
        }
        found = alike if found is None else found & alike
    return tuple(sorted(found or ()))


def _follow(copy: Any, parameter: Tensor) -> None:
    """Moved as the parameter was since the copy was last written there; what rounding hides is kept."""
    if isinstance(copy, Tensor) and copy.shape == parameter.shape:
        copy.add_(parameter.to(copy.dtype) - copy.to(parameter.dtype).to(copy.dtype))


def state_made_by(optimizer: Any, number: int) -> Mapping[str, Any]:
    """By a step of a copy of it, of its parameter of this number, as `state_dict()` counts them: what kinds
    of tensors it keeps is not known before it has stepped."""
    groups = [group for group in optimizer.param_groups for _ in group["params"]]
    every = [each for group in optimizer.param_groups for each in group["params"]]
    values = torch.zeros_like(plain_part_of(every[number].detach()))
    with torch.enable_grad():
        trial = Trial(optimizer, groups[number], values)
        trial.step(torch.zeros_like(values))
    return trial.state


class Trial:
    """A copy of an optimizer with one made-up parameter, and nobody's hooks."""

    def __init__(self, optimizer: Any, group: Mapping[str, Any], made_up: torch.dtype | Tensor) -> None:
        """The parameter's type, or its values."""
        if isinstance(made_up, torch.dtype):
            made_up = _start(group).to(made_up)
        self.parameter = torch.nn.Parameter(made_up)
        self._copy = object.__new__(type(optimizer))
        own = {name: value for name, value in vars(optimizer).items() if not _is_others(optimizer, name)}
        rate = {"lr": _rate_like(group["lr"])} if "lr" in group else {}
        # Copies: some keep running sums in their groups, as Prodigy does, and write to them in place.
        settings = {key: copy.deepcopy(each) for key, each in group.items() if key != "params"}
        groups = [{**settings, **rate, "params": [self.parameter]}]
        self._copy.__setstate__({**own, "state": defaultdict(dict), "param_groups": groups})
        if hasattr(self._copy, "train"):  # one with modes, as Schedule-Free
            self._copy.train()

    def step(self, gradient: Tensor) -> None:
        self.parameter.grad = gradient.to(self.parameter.device, self.parameter.dtype)
        with uncompiled():
            step_without_hooks(self._copy)

    @property
    def state(self) -> Mapping[str, Any]:
        state: Mapping[str, Any] = self._copy.state[self.parameter]
        return state


def _rate_like(rate: Any) -> Any:
    """A tensor where it is one: torchao's optimizers take nothing else."""
    return torch.full_like(rate, _TRIAL_RATE) if isinstance(rate, Tensor) else _TRIAL_RATE


def _is_others(optimizer: Any, name: str) -> bool:
    """Somebody else's: hooks, a step that a schedule has wrapped, what a scaler put there."""
    return name.endswith("_hooks") or hasattr(type(optimizer), name) or name in _OF_A_SCALER


def _is_called_off(optimizer: Any) -> bool:
    """Whether a fused optimizer will not step: its GradScaler has found an overflow."""
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found)


def kind_of(group: Mapping[str, Any]) -> tuple[Any, ...]:
    """What a trial depends on: switches and eps. Numbers are not in it: schedules and optimizers themselves
    change theirs in every step (OneCycleLR betas, Prodigy and Schedule-Free what they count)."""
    kept = {key: each for key, each in group.items() if key == "eps" or isinstance(each, bool | str | None)}
    return group["params"][0].dim(), *sorted((key, repr(each)) for key, each in kept.items())


def _start(group: Mapping[str, Any]) -> Tensor:
    like = group["params"][0]
    start = torch.linspace(0.5, 1.5, _SIDE ** like.dim(), dtype=torch.float32, device=like.device)
    return start.view((_SIDE,) * like.dim())


def _noise(group: Mapping[str, Any], source: torch.Generator) -> Tensor:
    shape = (_SIDE,) * group["params"][0].dim()
    return torch.randn(shape, dtype=torch.float32, device="cpu", generator=source)
