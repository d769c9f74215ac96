"""Who has to know when a backward pass of this thread begins and ends, whoever starts it and of what graph.

torch has hooks on tensors and modules, and none on a whole pass: a graph can be entered anywhere (a loss of
intermediate values, a gradient penalty's second pass), so that no tensor's hook is sure to come first. All
passes go through one function of torch's, which is wrapped for as long as somebody listens.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from gradsieve import torch_names


class Listener(Protocol):
    @property
    def graph_of(self) -> int | None:
        """The thread in which a graph was last recorded that a pass may run through; None: there is none."""
        ...

    def begin_backward(self) -> None:
        """A pass begins that may be of this listener's graph."""
        ...

    def end_backward(self, completed: bool, frees_graph: bool) -> None:
        """It has ended, or broken off; whether no other pass can run through the same graph."""
        ...


_listeners: list[weakref.ref[Any]] = []
"""In the order in which they came, the same on all ranks: what they do may need all of them."""
_unwrap: Callable[[], None] | None = None
_depth = threading.local()


def listen(listener: Listener) -> None:
    global _unwrap
    _listeners.append(weakref.ref(listener, _forget))
    if _unwrap is None:
        _unwrap = torch_names.wrap_backward(_around)


def leave(listener: Listener) -> None:
    for each in [each for each in _listeners if each() is listener]:
        _forget(each)


def _forget(reference: weakref.ref[Any]) -> None:
    global _unwrap
    if reference in _listeners:
        _listeners.remove(reference)
    if not _listeners and _unwrap is not None:
        _unwrap()
        _unwrap = None


def _around(run: Callable[..., Any]) -> Callable[..., Any]:
    @torch_names.never_compiled
    def watched(*args: Any, **kwargs: Any) -> Any:
        if getattr(_depth, "value", 0):  # one within another, as a checkpoint's
            return run(*args, **kwargs)
        _depth.value = 1
        concerned = _concerned(threading.get_ident())
        completed = False
        try:
            for each in concerned:
                each.begin_backward()
            result = run(*args, **kwargs)
            completed = True
            return result
        finally:
            _depth.value = 0
            _end(concerned, completed, completed and not torch_names.keeps_graph(*args, **kwargs))

    return watched


def _concerned(thread: int) -> list[Any]:
    """Those with a graph of this thread; where there are none, all with a graph."""
    alive = [each for reference in list(_listeners) if (each := reference()) is not None]
    here = [each for each in alive if each.graph_of == thread]
    return here or [each for each in alive if each.graph_of is not None]


def _end(concerned: list[Any], completed: bool, frees_graph: bool) -> None:
    """All are called, also if one of them raises."""
    if concerned:
        try:
            concerned[0].end_backward(completed, frees_graph)
        finally:
            _end(concerned[1:], completed, frees_graph)
