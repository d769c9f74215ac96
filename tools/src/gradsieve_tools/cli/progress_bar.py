"""Progress on stderr: a bar with the time left, or plain lines where a bar would only make a mess."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Advance = Callable[[float, str], None]  # work done since the last call, and its name

_LINE_SECONDS = 15.0  # between two plain lines: a log file should stay readable
_FARTHEST = 20.0  # ratio of remaining to finished work up to which an estimate is shown


class Estimate:
    """The time left, from the work since the first report: what came before that was start-up as well."""

    def __init__(self, total: float) -> None:
        self.total, self.done = total, 0.0
        self._first: tuple[float, float] | None = None

    def advance(self, amount: float) -> None:
        self.done += amount
        if self._first is None:
            self._first = time.monotonic(), self.done

    @property
    def spoken(self) -> str:
        """Empty as long as there is no sound one."""
        if self._first is None:
            return ""
        since, before = self._first
        seconds, work = time.monotonic() - since, self.done - before
        left = self.total - self.done
        if work <= 0 or left > _FARTHEST * work:
            return ""
        return f"about {_spoken(seconds * left / work)} left"


@contextmanager
def progress(total: float) -> Iterator[Advance]:
    """Show the way to `total`, in whatever unit the work is counted."""
    if sys.stderr.isatty():
        with _bar(total) as advance:
            yield advance
    else:
        yield _lines(total)


@contextmanager
def _bar(total: float) -> Iterator[Advance]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    estimate = Estimate(total)
    columns = [BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[left]}  {task.description}")]
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total, left="")

        def advance(amount: float, doing: str) -> None:
            estimate.advance(amount)
            bar.update(task, advance=amount, description=doing, left=estimate.spoken)

        yield advance


def _lines(total: float) -> Advance:
    estimate, last = Estimate(total), time.monotonic()

    def advance(amount: float, doing: str) -> None:
        nonlocal last
        estimate.advance(amount)
        now = time.monotonic()
        if now - last < _LINE_SECONDS:
            return
        last = now
        parts = filter(None, [doing, estimate.spoken])
        print(f"{estimate.done / total:4.0%}  {'; '.join(parts)}", file=sys.stderr, flush=True)

    return advance


def _spoken(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
