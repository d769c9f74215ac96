"""Where the user's program is: for a line in the log about a rank that others wait for."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

_OTHERS = frozenset({"torch", "gradsieve", *sys.stdlib_module_names})
_PACKAGES = ("site-packages", "dist-packages")
_WRAPPER = "wrapper"
"""What torch puts around its collectives."""


def of_main_thread() -> str:
    """`in barrier() at train.py:41`: torch's collective, if it is in one, and the user's own line."""
    frames = list(_frames())
    others = [frame for frame in frames if _module(frame).partition(".")[0] not in _OTHERS]
    own = [frame for frame in others if not any(each in frame.f_code.co_filename for each in _PACKAGES)]
    if not others:
        return "at an unknown place"
    here = (own or others)[0]
    inner = frames[: frames.index(here)]  # torch may also have called the program, from further out
    call = next(filter(None, map(_collective, inner)), "")
    place = f"at {Path(here.f_code.co_filename).name}:{here.f_lineno}"
    return f"in {call}() {place}" if call else place


def is_main_thread_in(call: str) -> bool:
    """Whether it is inside of this call of ours, such as `flush()`."""
    name = call.removesuffix("()")
    return any(frame.f_code.co_name == name and _is_ours(frame) for frame in _frames())


def _frames() -> Iterator[FrameType]:
    """Of the main thread, the innermost first."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _collective(frame: FrameType) -> str:
    name = frame.f_code.co_name
    return name if _module(frame).startswith("torch.distributed.") and name != _WRAPPER else ""


def _is_ours(frame: FrameType) -> bool:
    return _module(frame).startswith("gradsieve.")


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))
