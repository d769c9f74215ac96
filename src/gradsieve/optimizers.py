"""What an optimizer does, by one experiment; and which optimizers cannot work.

The experiment runs copies of the optimizer on small tensors of their own, a dozen steps each:

    plain      gradients of unlike sizes      along exp_avg / (sqrt(exp_avg_sq) + eps)?
    larger     ten times as large             how much longer are its steps?
    decaying   of zero, with weight decay     is the decay normalised as gradients are?
    pushed     as plain, but the parameter is moved after the first step: is it still moved after the last?

Nothing that belongs to the user's optimizer is written: its copy has copies of all that lies in attributes
and groups, and the small tensor wherever it refers to a parameter. All ranks find the same: the settings are
the same, and sizes of gradients are what all of them measured together.
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
from torch.nn import Parameter
from torch.optim import Optimizer

from gradsieve.errors import ConfigError
from gradsieve.torch_names import calls_hooks, plain_part_of, step_without_hooks, uncompiled
from gradsieve.units import flat_view

_log = logging.getLogger("gradsieve")

# RAdam normalises nothing in its first five steps; Lookahead pulls parameters back every five or six.
_STEPS = 12
_RATE, _DECAY, _LARGER, _PUSH = 1e-3, 0.1, 10.0, 0.5
# Elements along the first dimension of the small tensor, and along the others.
_ROWS, _SIDE = 64, 4
# Sizes of gradients are rounded to powers of this: there is one experiment for each.
_POWERS_OF = 16.0
# A size far above any eps.
_LARGE = 256.0
# What settings are that do not change from step to step.
_SWITCH = (bool, str, type(None))
# Least cosine of a step and where its moments lead.
_ALONG = 0.99
_OF_A_SCALER = frozenset({"grad_scale", "found_inf"})


@dataclass(frozen=True, slots=True)
class Traits:
    """Traits say what an optimizer does with the parameters of one group."""

    # The power of its gradients' size that the size of its steps follows: 1 for SGD, 0 for Adam.
    elasticity: float = 1.0
    # Weight decay takes off rate * decay * parameter, whatever the gradients are.
    decays_apart: bool = False
    # Steps go along exp_avg / (sqrt(exp_avg_sq) + eps).
    has_moments: bool = False
    # Keys of its state under which it keeps the weights.
    copies: tuple[str, ...] = ()

    def factor(self, rho: float) -> float:
        """Return how much longer steps have to be if ranks' gradients agree by rho."""
        return float(rho ** (-(1.0 - self.elasticity) / 2))


_known: weakref.WeakKeyDictionary[Any, dict[Any, Traits]] = weakref.WeakKeyDictionary()


def traits_of(optimizer: Any, group: Mapping[str, Any], gradient: float = _LARGE) -> Traits:
    """Find the traits by experiment, once for each kind of group and size of gradients (root mean square;
    0 if not known). Raises if the optimizer keeps the weights where they cannot be changed."""
    floating = [parameter for parameter in group["params"] if parameter.is_floating_point()]
    if type(optimizer) is torch.optim.SGD or not floating or not gradient > 0.0:
        return Traits()
    power = round(math.log(gradient, _POWERS_OF))
    like = max(floating, key=Tensor.numel)
    # Of numbers eps alone: schedules and optimizers change theirs in every step (OneCycleLR betas, Prodigy
    # and Schedule-Free what they count).
    switches = [each for each in group.items() if isinstance(each[1], _SWITCH)]
    kind = power, like.dim(), like.dtype, repr(group.get("eps")), *switches
    known = _known.setdefault(optimizer, {})
    if kind not in known:
        known[kind] = _found(optimizer, group, like, _POWERS_OF**power)
    return known[kind]


def _found(optimizer: Any, group: Mapping[str, Any], like: Tensor, size: float) -> Traits:
    try:
        with torch.enable_grad():
            return Experiment(optimizer, group, like, size).traits()
    except ConfigError:
        raise
    except Exception as error:
        _log.warning(
            "%s could not be tried out (%s: %s), so that its steps are left as they are. If it divides by "
            "the size of its gradients, models learn more slowly than with plain DDP; if it keeps a copy of "
            "the weights, its steps undo what other ranks send: compare a short training with plain DDP's",
            type(optimizer).__name__,
            type(error).__name__,
            error,
        )
        return Traits()


class Experiment:
    """An experiment with copies of one optimizer and one of its groups."""

    def __init__(self, optimizer: Any, group: Mapping[str, Any], like: Tensor, size: float) -> None:
        self.optimizer, self.group, self.dtype = optimizer, group, like.dtype
        shape = (_ROWS, *[_SIDE] * (like.dim() - 1)) if like.dim() else ()
        count, wide = math.prod(shape), torch.float32
        self.start = torch.linspace(0.5, 1.5, count, dtype=wide, device=like.device).view(shape)
        # Nearly the same in all steps; and elements' sizes are so unlike that a mean of divided gradients
        # cannot pass for a divided mean.
        source = torch.Generator().manual_seed(0)
        order, *noises = torch.randn(1 + _STEPS, count, generator=source, dtype=wide, device="cpu")
        sizes = torch.logspace(0.0, -2.0, count, dtype=wide, device="cpu")[order.argsort()] * order.sign()
        sizes *= size / sizes.square().mean().sqrt()
        self.gradients = [(sizes * (1.0 + 0.1 * noise)).view(shape) for noise in noises]

    def traits(self) -> Traits:
        undecayed = {"weight_decay": 0.0} if "weight_decay" in self.group else {}
        plain, moved = self.last_step(1.0, undecayed)
        _, moved_more = self.last_step(_LARGER, undecayed)
        elasticity, apart, along = 1.0, False, False
        if 0.0 < (ratio := float(moved_more.norm() / moved.norm())) < math.inf:
            elasticity = round(min(max(math.log(ratio, _LARGER), 0.0), 1.0), 2)
        if elasticity < 1.0 and undecayed:
            decaying, decayed = self.last_step(0.0, {"weight_decay": _DECAY})
            expected = -_RATE * _DECAY * decaying.parameter.detach()
            apart = bool((decayed - expected).norm() < 0.01 * expected.norm())
        eps, moments = self.group.get("eps", 0.0), moments_in(plain.state, moved)
        if moments is not None and isinstance(eps, int | float):
            first, second = (moment.double() for moment in moments)
            leads = first / (second.sqrt() + eps)
            along = float(torch.cosine_similarity(-moved.flatten(), leads, dim=0)) > _ALONG
        return Traits(elasticity, apart, along, self.copies())

    def last_step(self, scale: float, settings: Mapping[str, Any]) -> tuple[Trial, Tensor]:
        """The copy after its last step, and what that moved the parameter by."""
        trial, before = Trial(self.optimizer, {**self.group, **settings}, self.start), self.start
        for gradient in self.gradients:
            before = trial.parameter.detach().clone()
            trial.step(scale * gradient)
        return trial, trial.parameter.detach() - before

    def copies(self) -> tuple[str, ...]:
        """Keys of the state that have to follow the parameter, if a push is to last."""
        lasts, equal = self.push(())
        if lasts:
            return ()
        if equal and self.push(equal)[0]:
            return equal
        raise ConfigError(
            f"{type(self.optimizer).__name__} computes the parameters from weights that it keeps elsewhere, "
            "so that its next step would undo what other ranks sent: use "
            "exchange=gradsieve.Gradients(), with which all ranks take the same step"
        )

    def push(self, followers: tuple[str, ...]) -> tuple[bool, tuple[str, ...]]:
        """Whether a push after the first step lasts; and keys of what is the parameter after every step."""
        push, ends = _PUSH * max(1.0, float(self.gradients[0].abs().max())), []
        equal: list[set[str]] = []
        for distance in (push, 0.0):
            trial = Trial(self.optimizer, self.group, self.start.to(self.dtype))
            own, equal = trial.parameter.detach(), []
            for number, gradient in enumerate(self.gradients):
                trial.step(gradient)
                equal.append({key for key, kept in trial.state.items() if _is_equal(kept, own)})
                own.add_(distance if number == 0 else 0.0)
                for key in followers:
                    follow(trial.state.get(key), own)
            ends.append(own.double().mean())
        lasts = abs(float(ends[0] - ends[1]) - push) < 0.1 * push
        return lasts, tuple(sorted(set.intersection(*equal)))


def _is_equal(kept: Any, parameter: Tensor) -> bool:
    """Whether both are equal, rounded to the parameter's type."""
    if type(kept) not in (Tensor, Parameter) or kept.shape != parameter.shape:
        return False
    return torch.equal(kept.to(parameter.dtype), parameter)


def moments_in(state: Mapping[str, Any], parameter: Tensor) -> tuple[Tensor, Tensor] | None:
    """Adam's moments by torch's names, flat, in the order in which the parameter's elements lie in memory."""
    found: list[Tensor] = []
    for key in ("exp_avg", "exp_avg_sq"):
        moment = state.get(key)
        if not isinstance(moment, Tensor) or type(plain := plain_part_of(moment)) is not Tensor:
            return None
        layout = plain.shape, plain.stride(), plain.device
        if not plain.is_floating_point() or layout != (parameter.shape, parameter.stride(), parameter.device):
            return None
        found.append(flat_view(plain))
    return found[0], found[1]


def follow(weights: Any, parameter: Tensor) -> None:
    """Move a copy of the weights as the parameter was moved since the copy was last written there. What
    rounding to the parameter's type hides is kept."""
    if isinstance(weights, Tensor) and weights.shape == parameter.shape:
        weights.add_(parameter.to(weights.dtype) - weights.to(parameter.dtype).to(weights.dtype))


# -- a copy of an optimizer ---------------------------------------------------------------------------------


class Trial:
    """A copy of an optimizer that steps one parameter of its own. No hook hears of it."""

    def __init__(self, optimizer: Any, group: Mapping[str, Any], start: Tensor) -> None:
        self.parameter = Parameter(start.clone())
        # Whatever the optimizer refers to, its copy refers to a copy of that, and this instead of parameters.
        users = [parameter for each in optimizer.param_groups for parameter in each["params"]]
        memo: dict[int, Any] = {id(parameter): self.parameter for parameter in users}
        own = {key: copy.deepcopy(value, memo) for key, value in group.items() if key != "params"}
        if "lr" in group:  # a tensor where it is one: torchao's optimizers take nothing else
            rate = group["lr"]
            own["lr"] = torch.full_like(rate, _RATE) if isinstance(rate, Tensor) else _RATE
        self._copy = _copied(optimizer, [{**own, "params": [self.parameter]}], memo)
        if hasattr(self._copy, "train"):  # one with modes, as Schedule-Free
            self._copy.train()

    def step(self, gradient: Tensor) -> None:
        self.parameter.grad = gradient.to(self.parameter.device, self.parameter.dtype, copy=True)
        with uncompiled():
            step_without_hooks(self._copy)

    @property
    def state(self) -> Mapping[str, Any]:
        state: Mapping[str, Any] = self._copy.state[self.parameter]
        return state


def _copied(optimizer: Any, groups: list[dict[str, Any]], memo: dict[int, Any]) -> Any:
    """Copy the optimizer, and those that it puts a rule around, with these groups and no state."""
    made = object.__new__(type(optimizer))
    memo |= {id(optimizer): made, id(optimizer.param_groups): groups, id(optimizer.state): defaultdict(dict)}
    own = {
        name: value
        for name, value in vars(optimizer).items()
        # not hooks, a step that a schedule has wrapped, or what a GradScaler lends a fused optimizer
        if not (name.endswith("_hooks") or hasattr(type(optimizer), name) or name in _OF_A_SCALER)
    }
    for value in own.values():
        if isinstance(value, Optimizer) and id(value) not in memo:
            _copied(value, groups, memo)
    made.__setstate__(copy.deepcopy(own, memo))
    return made


def state_made_by(optimizer: Any, number: int) -> Mapping[str, Any]:
    """Return what a copy's first step makes for the parameter that has this number in `state_dict()`: which
    kinds of tensors an optimizer keeps is not known before it has stepped."""
    parameters = [(each, group) for group in optimizer.param_groups for each in group["params"]]
    parameter, group = parameters[number]
    values = torch.zeros_like(plain_part_of(parameter.detach()))
    with torch.enable_grad():
        trial = Trial(optimizer, group, values)
        trial.step(values)
    return trial.state


# -- which optimizers cannot work ---------------------------------------------------------------------------

MANY_CLOSURES = (
    "evaluates its closure several times a step, each rank as often as its own loss asks for, so that ranks "
    "would exchange different things: use plain DDP for it"
)
# A framework's wrapper is known by its module and not by having an `.optimizer`: one that adds a rule of its
# own to another's (Lookahead) has that too, and taken off, its state would not be saved.
_FRAMEWORKS = frozenset({"accelerate", "lightning", "pytorch_lightning", "lightning_fabric"})


def as_list(optimizers: Any) -> list[Any]:
    """Return the optimizers, without what frameworks put around them. Refuses what cannot work."""
    found = []
    for optimizer in optimizers if isinstance(optimizers, Iterable) else [optimizers]:
        while type(optimizer).__module__.partition(".")[0] in _FRAMEWORKS and hasattr(optimizer, "optimizer"):
            optimizer = optimizer.optimizer
        name = type(optimizer).__name__
        if not isinstance(getattr(optimizer, "param_groups", None), list):
            raise ConfigError(f"{name} is not an optimizer: it has no param_groups")
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ConfigError(f"{name} {MANY_CLOSURES}")
        if hasattr(optimizer, "first_step") and hasattr(optimizer, "second_step"):
            raise ConfigError(
                f"{name} moves the parameters between two backward passes and puts them back, which would be "
                "exchanged as if it were a step: use plain DDP for it"
            )
        if not _is_noticed(optimizer):
            raise ConfigError(
                f"{name} is not a torch.optim.Optimizer, so that its steps would not be noticed: derive it "
                "from torch.optim.Optimizer and call super().__init__(params, defaults)"
            )
        found.append(optimizer)
    if not found:
        raise ConfigError("there is no optimizer: give the one, or the ones, that step the model")
    return found


def _is_noticed(optimizer: Any) -> bool:
    """Whether torch calls hooks around its steps, or around those of one that it puts a rule around."""
    while optimizer is not None and not calls_hooks(optimizer):
        optimizer = getattr(optimizer, "optimizer", None)
    return optimizer is not None


def refuse_sharded(optimizers: Sequence[Any], exchanges_steps: bool) -> None:
    if exchanges_steps and any(type(each).__name__ == "ZeroRedundancyOptimizer" for each in optimizers):
        raise ConfigError(
            "a ZeroRedundancyOptimizer steps each parameter on one rank, by that rank's gradient alone: "
            "use exchange=gradsieve.Gradients()"
        )


def refuse_unfrozen(frozen: Mapping[str, Tensor], where: str) -> None:
    unfrozen = [name for name, parameter in frozen.items() if parameter.requires_grad]
    if unfrozen:
        raise ConfigError(
            f"{where}: {', '.join(unfrozen[:4])} required no gradient when the sync was made, so "
            "they are exchanged with no other rank: flush() and close() the sync, wrap the model in "
            "DistributedDataParallel again and attach again"
        )
