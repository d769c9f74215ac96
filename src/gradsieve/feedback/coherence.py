"""How much of what one rank has is what all of them have: the part of it worth believing.

    v_r   the residual of rank r, or its gradient = what all ranks found alike + the noise of its own batches
    a     the factor that makes a v_r the best guess of the mean over ranks of v, in the least squares:

          a = sum over ranks of <v_r, mean v> / sum over ranks of |v_r|^2 = P |mean v|^2 / sum of |v_r|^2

It is 1 where all ranks hold the same and 1/P where they hold noise alone. Both sums are formed over a few
elements drawn again in every step, the same ones on all ranks. They are piggybacked on an all-reduce: of the
residual in one step (the preview, `local_steps.py`), of gradients in the next (`step_length.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradsieve.types import Host, Vector, to_device

FEWEST, MOST, APART = 16, 256, 8192
"""Elements of a unit that are looked at in a step: one in so many, within these bounds, so that looking costs
little of what a small model sends."""
SHORTEST, LONGEST, PART = 25, 500, 10
"""The average is over the last tenth of all looks, of which there is one in two steps: at least 25, 50 steps,
and at most 500, as many steps as Adam averages over. Ranks' gradients agree less and less, fast in the first
hundreds of steps and ever more slowly after them: a longer average knows that too late, and a shorter one is
noise (ADR 41)."""


@dataclass(frozen=True, slots=True)
class Coherence:
    """The same bits on every rank."""

    alike: float = 0.0
    """P |mean v|^2, summed over probes and, with falling weight, over looks."""
    all: float = 0.0
    """Sum over ranks of |v|^2, likewise."""
    seen: float = 0.0
    """Elements that this is the sum of, likewise."""

    @property
    def size(self) -> float:
        """Root mean square of an element of v; 0 before anything was seen."""
        return math.sqrt(self.all / self.seen) if self.seen > 0.0 else 0.0

    def share(self, world: int) -> float:
        """a; 1 before anything was seen."""
        return min(max(self.alike / self.all, 1.0 / world), 1.0) if self.all > 0.0 else 1.0

    def among(self, old: int, new: int) -> Coherence:
        """As it would have been seen with another number of ranks, each with as much noise of its own. One
        rank alone cannot tell."""
        if old == 1 or not self.all > 0.0:
            return Coherence()
        alike = (self.share(old) * old - 1.0) / (old - 1)
        every = self.all * new / old
        return Coherence((alike + (1.0 - alike) / new) * every, every, self.seen * new / old)

    def after(self, seen: NDArray[np.float64], world: int, step: int, count: int = 0) -> Coherence:
        """With what `squares` gave of this step, one row a unit, of so many elements of each rank. Squares
        that overflow are ignored."""
        alike, every = seen.sum(0).tolist()
        if not math.isfinite(alike + every):
            return self
        past = 1.0 - 1.0 / min(max(SHORTEST, step // 2 / PART), LONGEST)
        return Coherence(
            past * self.alike + alike / world,
            past * self.all + every,
            past * self.seen + count * world,
        )


def places(n: int, step: int) -> Host:
    """Of n elements those that are looked at in this step, sorted."""
    return np.sort(np.random.default_rng(step).integers(max(1, n), size=count(n) if n else 0))


def places_in(sizes: Sequence[int], step: int) -> list[Host]:
    """The same for vectors of these sizes, concatenated: places in each of them."""
    ends = np.cumsum(sizes)
    drawn = places(int(ends[-1]), step)
    inside = np.split(drawn, np.searchsorted(drawn, ends)[:-1])
    return [here - (end - size) for here, end, size in zip(inside, ends.tolist(), sizes, strict=True)]


def count(n: int) -> int:
    """How many are looked at."""
    return min(MOST, max(FEWEST, n // APART))


def probe(waiting: Vector, step: int) -> Tensor:
    """The residual at the elements that are looked at in this step, then the sum of its squares."""
    if not waiting.numel():
        return torch.zeros(1, dtype=waiting.dtype, device=waiting.device)
    here = places(waiting.numel(), step)
    return with_square(waiting.at(here, to_device(here, torch.int64, waiting.device)))


def with_square(values: Tensor) -> Tensor:
    return torch.cat([values, values.square().sum()[None]])


def squares(total: Tensor) -> Tensor:
    """Of a unit's probes, summed over ranks: the square of the sums, and the sum of the squares."""
    total = total.double()
    return torch.stack([total[:-1].square().sum(), total[-1]])
