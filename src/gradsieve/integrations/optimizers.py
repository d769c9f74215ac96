"""Every optimizer that steps the model is heard of, also one that was made after `attach` or is called by a
framework: torch calls global hooks around the step of each of them.

    before    just before parameters are written: for `step(closure)` that is after the closure, which
              computes the gradient
    after     when they have been written
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from gradsieve.errors import ConfigError
from gradsieve.integrations.wrappers import optimizer_in


class Listener(Protocol):
    def before_update(self, names: Set[str], optimizer: Any) -> None: ...

    def after_update(self, names: Set[str]) -> None: ...


class Optimizers:
    """Those that step any of these parameters, as they come to be known."""

    def __init__(self, parameters: Mapping[str, Tensor], listener: Listener) -> None:
        self._names = {parameter: name for name, parameter in parameters.items()}
        # Weak: torch keeps the hooks for as long as Python runs.
        self._listener = weakref.ref(listener)
        self._known: weakref.WeakKeyDictionary[Any, tuple[list[int], Set[str]]] = weakref.WeakKeyDictionary()
        self._handles = (
            register_optimizer_step_pre_hook(_weakly(self, Optimizers._before)),
            register_optimizer_step_post_hook(_weakly(self, Optimizers._after)),
        )

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def names_in(self, optimizer: Any) -> Set[str]:
        """Which of our parameters it has now: groups can be added at any time."""
        lengths = [len(group["params"]) for group in optimizer.param_groups]
        known = self._known.get(optimizer)
        if known is None or known[0] != lengths:
            every = (parameter for group in optimizer.param_groups for parameter in group["params"])
            known = lengths, frozenset(self._names[each] for each in every if each in self._names)
            self._known[optimizer] = known
        return known[1]

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        listener, names = self._listener(), self.names_in(optimizer)
        if listener is None or not names:
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            listener.before_update(names, optimizer)
            return None
        after_closure = _followed_by(
            closure, lambda: listener.before_update(names, optimizer), type(optimizer).__name__
        )
        if "closure" in kwargs:
            return args, {**kwargs, "closure": after_closure}
        return (args[0], after_closure, *args[2:]), kwargs

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        listener, names = self._listener(), self.names_in(optimizer)
        if listener is not None and names:
            listener.after_update(names)


def _weakly(owner: Any, method: Callable[..., Any]) -> Callable[..., Any]:
    """A hook that does not keep its owner alive."""
    ref = weakref.ref(owner)

    def hook(*args: Any) -> Any:
        alive = ref()
        return None if alive is None else method(alive, *args)

    return hook


def _followed_by(closure: Callable[[], Any], then: Callable[[], None], name: str) -> Callable[[], Any]:
    calls = 0

    def both() -> Any:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise ConfigError(f"{name} {_MANY_CLOSURES}")
        result = closure()
        with torch.no_grad():
            then()
        return result

    return both


_MANY_CLOSURES = (
    "evaluates its closure several times a step, each rank as often as its own loss asks for, so that ranks "
    "would exchange different things: use plain DDP for it"
)
_TWO_STEPS = (
    "moves the parameters between two backward passes and puts them back, which would be exchanged as if it "
    "were a step: use plain DDP for it"
)


def as_list(optimizers: Any) -> list[Any]:
    """One optimizer or several, checked for what cannot work."""
    every = [optimizer_in(one) for one in (optimizers if isinstance(optimizers, Iterable) else [optimizers])]
    if not every:
        raise ConfigError("there is no optimizer: give the one, or the ones, that step the model")
    for one in every:
        if not isinstance(getattr(one, "param_groups", None), list):
            raise ConfigError(f"{type(one).__name__} is not an optimizer: it has no param_groups")
        if isinstance(one, torch.optim.LBFGS):
            raise ConfigError(f"{type(one).__name__} {_MANY_CLOSURES}")
        if hasattr(one, "first_step") and hasattr(one, "second_step"):
            raise ConfigError(f"{type(one).__name__} {_TWO_STEPS}")
    return every


def refuse_sharded(optimizers: Sequence[Any], exchange: str) -> None:
    if exchange == "steps" and any(type(one).__name__ == "ZeroRedundancyOptimizer" for one in optimizers):
        raise ConfigError(
            "a ZeroRedundancyOptimizer steps each parameter on one rank, by that rank's gradient alone: "
            "use preset=gradsieve.Treatment(exchange='gradients')"
        )


def uncovered(parameters: Mapping[str, Tensor], optimizers: Sequence[Any]) -> list[str]:
    """Parameters that none of these has."""
    covered = {each for one in optimizers for group in one.param_groups for each in group["params"]}
    return [name for name, parameter in parameters.items() if parameter not in covered]


def refuse_unfrozen(frozen: Mapping[str, Tensor], where: str) -> None:
    unfrozen = [name for name, parameter in frozen.items() if parameter.requires_grad]
    if unfrozen:
        raise ConfigError(
            f"{where}: {', '.join(unfrozen[:4])} required no gradient when the sync was made, so "
            "that nobody would exchange it: flush() and close() the sync, wrap the model in "
            "DistributedDataParallel anew and attach again"
        )
