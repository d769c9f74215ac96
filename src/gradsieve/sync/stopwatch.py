"""A rank's seconds, as a budget is found by: see `pipeline/budget.py`.

On an accelerator the host queues work and runs ahead, so that its clock says nothing about steps. There a
moment is an event in a stream, and seconds are the device's. An event can be read when the device has reached
it: what is reported is the step before the last one, whose exchange has been completed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from gradsieve.pipeline.budget import Times


@dataclass(slots=True)
class _Lap:
    """One exchange, in moments."""

    begun: Any
    needed: Any = None
    got: Any = None


class Stopwatch:
    """From the beginning of one exchange to that of the next."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.slack = 0.0
        """Seconds for which nobody needed an exchange, of the last one reported."""
        self._device = device
        self._laps: list[_Lap] = []
        """The pending one last."""

    def forget(self) -> None:
        """Whatever was before is no step."""
        self._laps = []

    def begin(self) -> Times:
        """An exchange begins: what was seen of the one before the last. A step of 0 seconds is none."""
        self._laps = [*self._laps[-2:], _Lap(self.moment())]
        if len(self._laps) < 3:
            return Times()
        lap, after, _ = self._laps
        if lap.got is None or lap.needed is None:  # it was not completed
            return Times()
        self.slack = self.between(lap.begun, lap.needed)
        waited = max(self.between(lap.needed, lap.got), 0.0)
        return Times(self.between(lap.begun, after.begun), self.slack, waited)

    def need(self) -> None:
        """Somebody waits for it from now on."""
        if self._laps:
            self._laps[-1].needed = self.moment()

    def got(self) -> None:
        """It has ended, maybe before anybody needs it; called by the thread that exchanges, which applies it
        now."""
        if self._laps:
            self._laps[-1].got = self.moment()

    def moment(self) -> Any:
        """Now, in the order of the stream that this thread works on."""
        if self._device is None or self._device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(device=self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return event

    def between(self, first: Any, then: Any) -> float:
        """Seconds."""
        if isinstance(first, float):
            return float(then - first)
        return 1e-3 * float(first.elapsed_time(then))
