"""What can happen to a rank: how it ends, or that it stops."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass

STOP = "SIGSTOP"
KINDS: dict[str, int | None] = {
    "SIGKILL": -signal.SIGKILL,
    STOP: None,
    "SIGTERM": -signal.SIGTERM,
    "exit 0": 0,
    "exit 1": 1,
    "abort": -signal.SIGABRT,
}
"""Exit codes of those to whom it happens, negative for a signal; None: they live on, once continued."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Before op number `op` of step number `step`, both from 0, on one rank."""

    kind: str
    rank: int
    step: int
    op: int

    @property
    def is_death(self) -> bool:
        return KINDS[self.kind] is not None


def strike(kind: str) -> None:
    """Let it happen to this process. Comes back only after a stop that somebody ended."""
    match kind:
        case "SIGKILL" | "SIGSTOP" | "SIGTERM":
            os.kill(os.getpid(), signal.Signals[kind])
        case "exit 0" | "exit 1":
            os._exit(int(kind[-1]))
        case "abort":
            os.abort()
    if kind != STOP:
        time.sleep(60.0)  # a signal to the process may be taken by another of its threads, a moment later
