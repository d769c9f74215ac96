"""A rank's seconds, as a budget is found by: see `pipeline/budget.py`."""

from __future__ import annotations

import time

from gradsieve.pipeline.budget import Times


class Stopwatch:
    """From the beginning of one exchange to that of the next."""

    def __init__(self) -> None:
        self.slack = 0.0
        """Seconds for which nobody needed the last exchange."""
        self._begun = self._needed = self._waited = self._computed = self._worked = 0.0

    def forget(self) -> None:
        """Whatever was before is no step."""
        self._begun = 0.0

    def begin(self) -> Times:
        """An exchange begins: what was seen since the last one did. A step of 0 seconds is none."""
        now = time.perf_counter()
        step = now - self._begun if self._begun else 0.0
        self._begun = now
        return Times(step, self.slack, self._waited, self._computed)

    def need(self) -> None:
        """Somebody waits for it from now on."""
        self._needed = time.perf_counter()
        self.slack = self._needed - self._begun

    def got(self) -> None:
        """It has ended; called by the thread that exchanges, which completes it now."""
        self._waited = time.perf_counter() - self._needed

    def done(self) -> None:
        """It was completed, by the same thread."""
        worked = time.thread_time()
        self._computed = max(worked - self._worked, 0.0)  # another thread's clock begins again
        self._worked = worked
