"""How much of what waits on one rank is what waits on all of them: the part of it worth believing.

    e_r   what waits on rank r = what all ranks found alike + the noise of its own batches
    a     the factor that makes a e_r the best guess of the mean over ranks of e, in the least squares:

          a = sum over ranks of <e_r, mean e> / sum over ranks of |e_r|^2 = P |mean e|^2 / sum of |e_r|^2

It is 1 where all ranks hold the same and 1/P where they hold noise alone. Both sums are formed over a few
elements drawn anew in every step, the same ones on all ranks, which ride along in an all-reduce.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradsieve.types import Vector

PROBES = 256
"""Elements of a unit that are looked at in a step."""
MEMORY = 0.98
"""Weight of the past, a step: some fifty steps tell of the present one."""


@dataclass(frozen=True, slots=True)
class Coherence:
    """The same bits on every rank."""

    alike: float = 0.0
    """P |mean e|^2, summed over probes and, with falling weight, over steps."""
    all: float = 0.0
    """Sum over ranks of |e|^2, likewise."""

    def preview(self, world: int) -> float:
        return min(max(self.alike / self.all, 1.0 / world), 1.0) if self.all > 0.0 else 1.0

    def after(self, seen: NDArray[np.float64], world: int) -> Coherence:
        """With what `squares` gave of this step, one row a unit."""
        alike, every = seen.sum(0).tolist()
        return Coherence(MEMORY * self.alike + alike / world, MEMORY * self.all + every)


def probe(waiting: Vector, step: int) -> Tensor:
    """What waits at the elements that are looked at in this step, then the sum of its squares."""
    if not waiting.numel():
        return torch.zeros(1, dtype=waiting.dtype, device=waiting.device)
    places = np.sort(np.random.default_rng(step).integers(waiting.numel(), size=PROBES))
    values = waiting.at(places, torch.from_numpy(places).to(waiting.device))
    return torch.cat([values, values.square().sum()[None]])


def squares(total: Tensor) -> Tensor:
    """Of a unit's probes, summed over ranks: the square of the sums, and the sum of the squares."""
    total = total.double()
    return torch.stack([total[:-1].square().sum(), total[-1]])
