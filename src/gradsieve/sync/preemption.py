"""Notice of an end: a signal to one rank, of which all ranks learn in the same step.

A handler only notes the signal, wherever the training is. The note goes along with the rank's next exchange
(`pipeline/tags.py`), and all ranks believe it where they complete that one. The user decides what to save
then, and where in the loop (ADR 43).
"""

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
        """Signals do again what they did before."""
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}
