"""Signals that would end the process: made to unwind it, and held back while it cleans up."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn

Handlers = dict[signal.Signals, Callable[[int, FrameType | None], Any] | int | None]

_ENDING = (signal.SIGTERM, signal.SIGHUP)


def unwind_on_ending() -> Handlers:
    """Let SIGTERM and SIGHUP raise SystemExit, where no handler is set; return what to restore."""
    if not _in_main_thread():
        return {}
    return {sig: signal.signal(sig, _exit) for sig in _ENDING if signal.getsignal(sig) is signal.SIG_DFL}


def restore(handlers: Handlers) -> None:
    for sig, handler in handlers.items():
        if handler is not None:  # None stands for a handler that is not Python's, which Python cannot restore
            signal.signal(sig, handler)


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Within the block these signals wait; after it, each that came takes its effect."""
    if not _in_main_thread():  # Python runs handlers in the main thread only: nothing can interrupt this one
        yield
        return
    came: list[int] = []
    usual: Handlers = {
        sig: signal.signal(sig, lambda number, _: came.append(number)) for sig in (signal.SIGINT, *_ENDING)
    }
    try:
        yield
    finally:
        restore(usual)
    for number in came:
        signal.raise_signal(number)


def _exit(number: int, _: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
