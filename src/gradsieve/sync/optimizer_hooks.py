"""Every optimizer that steps the model is noticed, also one that was made after `attach` or is called by a
framework: torch calls global hooks around the step of each of them.

    before    just before parameters are written: for `step(closure)` that is after the closure, which
              computes the gradient
    after     when they have been written, before any other hook of the optimizer's sees them

One pair of hooks serves all syncs of the process, in the order in which they were attached.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from gradsieve.errors import ConfigError
from gradsieve.optimizers import MANY_CLOSURES
from gradsieve.torch_names import never_compiled


class Listener(Protocol):
    def before_update(self, names: Set[str], optimizer: Any) -> None: ...

    def after_update(self, names: Set[str]) -> None: ...


# `OptimizerHooks` in the order in which they were made, which is the same on all ranks.
_all: list[weakref.ref[Any]] = []
_before_handle: RemovableHandle | None = None
# By optimizer.
_after_handles: weakref.WeakKeyDictionary[Any, RemovableHandle] = weakref.WeakKeyDictionary()


class OptimizerHooks:
    """Tell a listener of the steps of any of these parameters."""

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
        for reference in [reference for reference in _all if reference() is self]:
            _forget(reference)

    def known(self, given: Sequence[Any]) -> list[Any]:
        """The given optimizers, and others that have stepped these parameters, in the order in which they
        were noticed."""
        return [*given, *(other for other in self._known if other not in given and self._known[other][1])]

    def names_in(self, optimizer: Any) -> Set[str]:
        """Which of these parameters the optimizer has now: groups can be added and exchanged at any time."""
        ids = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
        known = self._known.get(optimizer)
        if known is None or known[0] != ids:
            known = ids, frozenset(self._names[each] for each in ids if each in self._names)
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
        hooks = reference()
        listener = None if hooks is None else hooks.listener()
        if hooks is not None and listener is not None and (names := hooks.names_in(optimizer)):
            found.append((listener, names))
    return found


@never_compiled
def _before(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    concerned = _concerned(optimizer)
    if not concerned:
        return None
    _be_first_after(optimizer)

    def call_listeners() -> None:
        for listener, names in concerned:
            listener.before_update(names, optimizer)

    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if not callable(closure):
        call_listeners()
        return None
    after_closure = _followed_by(closure, call_listeners, type(optimizer).__name__)
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
            raise ConfigError(f"{name} {MANY_CLOSURES}")
        result = closure()
        with torch.no_grad():
            then()
        return result

    return both
