"""Every optimizer that steps the model is heard of, also one that was made after `attach` or is called by a
framework: torch calls global hooks around the step of each of them.

    before    just before parameters are written: for `step(closure)` that is after the closure, which
              computes the gradient
    after     when they have been written, before any other hook of the optimizer's sees them

One pair of hooks serves all syncs of the process, in the order in which they were attached.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from gradsieve.errors import ConfigError
from gradsieve.torch_names import calls_hooks, never_compiled


class Listener(Protocol):
    def before_update(self, names: Set[str], optimizer: Any) -> None: ...

    def after_update(self, names: Set[str]) -> None: ...


_all: list[weakref.ref[Any]] = []
"""Of `Optimizers`, in the order in which they were made: the same on all ranks."""
_before_handle: RemovableHandle | None = None
_after_handles: weakref.WeakKeyDictionary[Any, RemovableHandle] = weakref.WeakKeyDictionary()
"""By optimizer."""


class OptimizerHooks:
    """Those that step any of these parameters, as they come to be known."""

    def __init__(self, parameters: Mapping[str, Tensor], listener: Listener) -> None:
        global _before_handle
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        # Weak: torch keeps the hooks for as long as Python runs.
        self.listener = weakref.ref(listener)
        self._known: weakref.WeakKeyDictionary[Any, tuple[list[int], Set[str]]] = weakref.WeakKeyDictionary()
        _all.append(weakref.ref(self, _forget))
        if _before_handle is None:
            _before_handle = register_optimizer_step_pre_hook(_before)

    def close(self) -> None:
        for each in [each for each in _all if each() is self]:
            _forget(each)

    def known(self, given: Sequence[Any]) -> list[Any]:
        """These, and others that have stepped our parameters, in the order in which they came to be known."""
        return [*given, *(each for each in self._known if each not in given and self._known[each][1])]

    def names_in(self, optimizer: Any) -> Set[str]:
        """Which of our parameters it has now: groups can be added and exchanged at any time."""
        every = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
        known = self._known.get(optimizer)
        if known is None or known[0] != every:
            known = every, frozenset(self._names[each] for each in every if each in self._names)
            self._known[optimizer] = known
        return known[1]


def _forget(reference: weakref.ref[Any]) -> None:
    global _before_handle
    if reference in _all:
        _all.remove(reference)
    if not _all and _before_handle is not None:
        _before_handle.remove()
        _before_handle = None
        for handle in list(_after_handles.values()):
            handle.remove()
        _after_handles.clear()


def _concerned(optimizer: Any) -> list[tuple[Any, Set[str]]]:
    """Listeners and which of their parameters this optimizer has."""
    found = []
    for reference in list(_all):
        one = reference()
        listener = None if one is None else one.listener()
        if one is not None and listener is not None and (names := one.names_in(optimizer)):
            found.append((listener, names))
    return found


@never_compiled
def _before(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    concerned = _concerned(optimizer)
    if not concerned:
        return None
    _be_first_after(optimizer)

    def tell() -> None:
        for listener, names in concerned:
            listener.before_update(names, optimizer)

    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if not callable(closure):
        tell()
        return None
    after_closure = _followed_by(closure, tell, type(optimizer).__name__)
    if "closure" in kwargs:
        return args, {**kwargs, "closure": after_closure}
    return (args[0], after_closure, *args[2:]), kwargs


@never_compiled
def _after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for listener, names in _concerned(optimizer):
        listener.after_update(names)


def _be_first_after(optimizer: Optimizer) -> None:
    """torch's global hooks come last, and the user's own would see what the step left."""
    if optimizer not in _after_handles:
        _after_handles[optimizer] = optimizer.register_step_post_hook(_after)
    handle = _after_handles[optimizer]
    hooks = handle.hooks_dict_ref()
    if hooks is not None and next(iter(hooks), handle.id) != handle.id:
        hooks.move_to_end(handle.id, last=False)


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
_NOT_TORCHS = (
    "is not a torch.optim.Optimizer, so that nobody hears of its steps and they would not be exchanged: "
    "derive it from torch.optim.Optimizer and call super().__init__(params, defaults)"
)

# A framework's wrapper is known by its module and not by having an `.optimizer`: one that adds a rule of its
# own to another's (Lookahead) has that too, and taken off, its state would not be saved.
_FRAMEWORKS = frozenset({"accelerate", "lightning", "pytorch_lightning", "lightning_fabric"})


def _unwrapped(optimizer: Any) -> Any:
    """The optimizer that steps, without what frameworks put around it."""
    while type(optimizer).__module__.partition(".")[0] in _FRAMEWORKS and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def as_list(optimizers: Any) -> list[Any]:
    """One optimizer or several, checked for what cannot work."""
    every = [_unwrapped(one) for one in (optimizers if isinstance(optimizers, Iterable) else [optimizers])]
    if not every:
        raise ConfigError("there is no optimizer: give the one, or the ones, that step the model")
    for one in every:
        if not isinstance(getattr(one, "param_groups", None), list):
            raise ConfigError(f"{type(one).__name__} is not an optimizer: it has no param_groups")
        if isinstance(one, torch.optim.LBFGS):
            raise ConfigError(f"{type(one).__name__} {_MANY_CLOSURES}")
        if hasattr(one, "first_step") and hasattr(one, "second_step"):
            raise ConfigError(f"{type(one).__name__} {_TWO_STEPS}")
        if not _is_heard_of(one):
            raise ConfigError(f"{type(one).__name__} {_NOT_TORCHS}")
    return every


def _is_heard_of(optimizer: Any) -> bool:
    """Whether torch calls hooks around its steps, or around those of one that it puts a rule around."""
    while optimizer is not None:
        if calls_hooks(optimizer):
            return True
        optimizer = getattr(optimizer, "optimizer", None)
    return False


def refuse_sharded(optimizers: Sequence[Any], exchanges_steps: bool) -> None:
    if exchanges_steps and any(type(one).__name__ == "ZeroRedundancyOptimizer" for one in optimizers):
        raise ConfigError(
            "a ZeroRedundancyOptimizer steps each parameter on one rank, by that rank's gradient alone: "
            "use exchange=gradsieve.Gradients()"
        )


def refuse_unfrozen(frozen: Mapping[str, Tensor], where: str) -> None:
    unfrozen = [name for name, parameter in frozen.items() if parameter.requires_grad]
    if unfrozen:
        raise ConfigError(
            f"{where}: {', '.join(unfrozen[:4])} required no gradient when the sync was made, so "
            "that nobody would exchange it: flush() and close() the sync, wrap the model in "
            "DistributedDataParallel again and attach again"
        )
