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
    is_applying: bool = False
    """While backward runs, on the thread that exchanges."""
    is_complete: bool = False
    was_good: bool = True
    error: BaseException | None = None
    """What applying it raised: nothing is applied twice."""
