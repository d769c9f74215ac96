"""Parts of k in whole numbers, the fractions round robin.

Which part gets a fraction changes from step to step (golden-ratio rounding), so that none is passed over for
ever where there are fewer elements to send than parts.
"""

from __future__ import annotations

import torch
from torch import Tensor


def phase(step: int) -> float:
    """Says where rounding begins in this step: in 0..1, and never long near where it was."""
    return step * 0.6180339887498949 % 1.0


def quota(weights: Tensor, total: float, step: int) -> Tensor:
    """Splits `total` in proportion to `weights` into whole numbers."""
    edges = (weights.double().cumsum(0) / weights.sum() * total + phase(step)).floor().long()
    return torch.diff(edges, prepend=edges.new_zeros(1))


def evenly(total: int, parts: int) -> list[int]:
    """Splits `total` into `parts` whole numbers; the first ones get what is left over."""
    return [total // parts + (part < total % parts) for part in range(parts)]
