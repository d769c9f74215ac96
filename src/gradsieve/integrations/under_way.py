"""An exchange from its beginning to the step that takes it over."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True)
class UnderWay:
    """Of all units."""

    tensors: dict[str, Tensor]
    futures: list[Future[None]]
    is_tentative: bool = False
    """It began with a forward, and no backward has shown yet that all ranks take part (`sync/tags.py`)."""
    is_taken_over: bool = False
    was_good: bool = True
