"""A signal to one rank that it will be stopped, of which all ranks learn in the same step.

The handler only notes the signal. The note is sent with the rank's next exchange (`pipeline/tags.py`), and
all ranks know of it when they complete that exchange. The user decides what to save then, and where (ADR
43)."""

from __future__ import annotations

import signal
from collections.abc import Iterable


class Notice:
    def __init__(self, signals: Iterable[signal.Signals]) -> None:
        self.is_given = False
        self._before = {number: signal.signal(number, self._take) for number in signals}

    def _take(self, *_: object) -> None:
        self.is_given = True

    def close(self) -> None:
        """Give the signals back the handlers that they had."""
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}
