"""Progress on stderr: a bar with the time left, or plain lines where a bar would only make a mess."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Advance = Callable[[float, str], None]
"""Work done since the last call, and what is being done."""

_LINE_SECONDS = 15.0
"""Between two plain lines: a log file should stay readable."""


@contextmanager
def progress(total: float) -> Iterator[Advance]:
    """Show the way to `total`, in whatever unit the work is counted."""
    if sys.stderr.isatty() and importlib.util.find_spec("rich"):
        with _bar(total) as advance:
            yield advance
    else:
        yield _lines(total)


@contextmanager
def _bar(total: float) -> Iterator[Advance]:
    from rich.console import Console  # the `cli` extra
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = [BarColumn(), TaskProgressColumn(), TimeRemainingColumn(), TextColumn("{task.description}")]
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda amount, doing: bar.update(task, advance=amount, description=doing)


def _lines(total: float) -> Advance:
    start = time.monotonic()
    done, last = 0.0, start

    def advance(amount: float, doing: str) -> None:
        nonlocal done, last
        done += amount
        now = time.monotonic()
        if now - last < _LINE_SECONDS:
            return
        last = now
        left = (now - start) * (total - done) / done if done else 0.0
        print(f"{done / total:4.0%}  {doing}; about {_spoken(left)} left", file=sys.stderr, flush=True)

    return advance


def _spoken(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
