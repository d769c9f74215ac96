"""Notice of an end: a signal on one rank, of which all ranks learn in the same step.

A handler only notes the signal, wherever the training is at that moment. The note goes along with the rank's
next exchange (`pipeline/tags.py`), so that all ranks hear of it with the same exchange, and believe it where
they all complete that one. What to save then, and where in the loop, is the user's to say (ADR 43).
"""

from __future__ import annotations

import signal
from collections.abc import Iterable


class Notice:
    """Whether one of these signals has come, since they were asked for."""

    def __init__(self, signals: Iterable[signal.Signals]) -> None:
        self.is_given = False
        self._before = {each: signal.signal(each, self._take) for each in signals}

    def _take(self, *_: object) -> None:
        self.is_given = True

    def close(self) -> None:
        """Signals do what they did before."""
        for each, handler in self._before.items():
            signal.signal(each, signal.SIG_DFL if handler is None else handler)
        self._before = {}
