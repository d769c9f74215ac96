"""An exchange from its beginning to the step that completes it."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True)
class Pending:
    """An exchange of all units."""

    tensors: dict[str, Tensor]
    futures: list[Future[None]]
    is_tentative: bool = False
    """It began with a forward; no backward has shown yet that all ranks take part (`pipeline/tags.py`)."""
    applied: Future[bool] | None = None
    """Whether no sum overflowed, from the moment on at which it was to be applied: nothing is applied twice,
    also where that raised or whoever waited for it was interrupted."""
