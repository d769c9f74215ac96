"""Clipping a rank's own gradient, before it is accumulated (DGC).

A gradient in the residual adds up with others, so that clipping after the exchange would throw away what
several steps had found. The law is not touched: what is clipped away was never accumulated.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def clip(gradients: Mapping[str, Tensor], most: float) -> None:
    """Shorten all of them together to the norm `most`. What is not finite stays so, for the vote."""
    norm = torch.stack([gradient.float().norm() for gradient in gradients.values()]).norm()
    if norm > most:
        for gradient in gradients.values():
            gradient.mul_(most / norm)
