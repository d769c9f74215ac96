"""Records what the fake device and this process's threads do, for `detector.py`.

The device writes its own trace. What orders threads of the host is noted here, by wrapping what Python and
torch have for it.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import itertools
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from accelerator import device as fake
from accelerator.detector import Detector, Line


@contextmanager
def recording() -> Iterator[Detector]:
    """Within it all work is recorded; after it the detector has read the trace."""
    detector = Detector()
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(queue, "SimpleQueue", _NotedQueue))
        stack.enter_context(mock.patch.object(dist.Work, "wait", _noting_end(dist.Work.wait, "carried")))
        stack.enter_context(_noting_futures())
        stack.enter_context(_noting_threads())
        stack.enter_context(_noting_torch_futures())
        stack.enter_context(_noting_backward())
        stack.enter_context(_noting_reads())
        torch.ops.gradsieve_fake.record(True, ctypes.cast(_SITE, ctypes.c_void_p).value)
        _note("thread", "main")
        try:
            yield detector
        finally:
            torch.ops.gradsieve_fake.record(False, 0)
            detector.read(Line.of(text) for text in torch.ops.gradsieve_fake.take())


def _note(kind: str, what: str) -> None:
    if kind not in getattr(_unnoted, "kinds", ()):
        torch.ops.gradsieve_fake.note(kind, what)


_unnoted = threading.local()


@contextmanager
def unnoted(kind: str) -> Iterator[None]:
    """For planted faults: within it this thread waits, so that the training goes on, and does not note it."""
    _unnoted.kinds = (kind,)
    try:
        yield
    finally:
        _unnoted.kinds = ()


# -- threads of the host ------------------------------------------------------------------------------


class _NotedQueue(queue.SimpleQueue):  # type: ignore[type-arg]
    """Whoever gets an item comes after whoever put it there."""

    _numbers = itertools.count()

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        key = f"item {next(self._numbers)}"
        _note("release", key)
        super().put((key, item), block, timeout)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        key, item = super().get(block, timeout)
        _note("acquire", key)
        return item


@contextmanager
def _noting_futures() -> Iterator[None]:
    kind = concurrent.futures.Future
    with ExitStack() as stack:
        for name in ("set_result", "set_exception"):
            stack.enter_context(mock.patch.object(kind, name, _noting_begin(getattr(kind, name))))
        for name in ("result", "exception"):
            stack.enter_context(mock.patch.object(kind, name, _noting_end(getattr(kind, name), "acquire")))
        yield


def _noting_begin(call: Callable[..., Any]) -> Callable[..., Any]:
    def noted(self: Any, *args: Any) -> Any:
        _note("release", f"future {id(self)}")
        return call(self, *args)

    return noted


def _noting_end(call: Callable[..., Any], kind: str) -> Callable[..., Any]:
    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return call(self, *args, **kwargs)
        finally:
            _note(kind, f"future {id(self)}")

    return noted


@contextmanager
def _noting_threads() -> Iterator[None]:
    start, run = threading.Thread.start, threading.Thread.run

    def noted_start(self: threading.Thread) -> None:
        _note("release", f"start of {id(self)}")
        start(self)

    def noted_run(self: threading.Thread) -> None:
        _note("thread", self.name)
        _note("acquire", f"start of {id(self)}")
        run(self)

    with mock.patch.multiple(threading.Thread, start=noted_start, run=noted_run):
        yield


# -- torch's own --------------------------------------------------------------------------------------


@contextmanager
def _noting_torch_futures() -> Iterator[None]:
    give = torch.futures.Future.set_result

    def noted(self: Any, result: Any) -> None:
        _note("release", f"future {id(self)}")
        give(self, result)

    with (
        mock.patch.object(torch.futures.Future, "set_result", noted),
        mock.patch.object(torch.futures, "collect_all", _Together),
    ):
        yield


class _Together:
    """Several of torch's futures, as DDP's hook uses them: for what comes then.

    DDP waits for that in C++, where nobody can note it. The future that it gets here has a device, so that it
    waits for an event as well, which the device notes: of a stream that nobody else uses.
    """

    def __init__(self, futures: list[Any]) -> None:
        self._futures, self._device = futures, torch.device(fake.NAME, 0)

    def then(self, call: Callable[[Any], Any]) -> Any:
        given: Any = torch.futures.Future(devices=[self._device])

        def noted(done: Any) -> None:
            for future in self._futures:
                _note("acquire", f"future {id(future)}")
            with torch.Stream(self._device):
                given.set_result(call(done))

        torch._C._collect_all(self._futures).add_done_callback(noted)
        return given


@contextmanager
def _noting_backward() -> Iterator[None]:
    run = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

    def noted(*args: Any, **kwargs: Any) -> Any:
        _note("backward_begins", "")
        return run(*args, **kwargs)

    with mock.patch.object(torch.autograd, "_engine_run_backward", noted):
        yield


@contextmanager
def _noting_reads() -> Iterator[None]:
    """Of a tensor's memory without an operator."""
    with ExitStack() as stack:
        for name in ("numpy", "tolist"):
            stack.enter_context(mock.patch.object(torch.Tensor, name, _noting_read(name)))
        yield


def _noting_read(name: str) -> Callable[..., Any]:
    call = getattr(torch.Tensor, name)

    def noted(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        torch.ops.gradsieve_fake.read_on_host(name, self.detach())
        return call(self, *args, **kwargs)

    return noted


# -- for reports --------------------------------------------------------------------------------------


def _write_site(text: int, room: int) -> None:
    """The innermost lines of gradsieve, or of a test, that have come here."""
    frame, lines = sys._getframe(), []
    while frame is not None and len(lines) < 3:
        path = frame.f_code.co_filename
        if "/gradsieve/" in path or "/accelerator/trainings" in path:
            lines.append(f"{path.rpartition('/')[2]}:{frame.f_lineno}")
        frame = frame.f_back  # type: ignore[assignment]
    site = " < ".join(lines).encode()[: room - 1] + b"\0"
    ctypes.memmove(text, site, len(site))


_SITE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int)(_write_site)
