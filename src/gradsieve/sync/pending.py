"""An exchange from its beginning to the step that completes it."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True)
class Pending:
    tensors: dict[str, Tensor]
    futures: list[Future[None]]  # of all units
    # Whether no sum overflowed, from the moment on at which it was to be applied: nothing is applied twice,
    # also where that raised or whoever waited for it was interrupted.
    applied: Future[bool] | None = None
