"""How much of what one rank holds is what all ranks hold, and not the noise of its own batches.

    v_r   the residual of rank r, or its gradient
    a     the factor that makes a v_r the best estimate of the mean over ranks of v, by least squares:

          a = sum over ranks of <v_r, mean v> / sum over ranks of |v_r|^2 = P |mean v|^2 / sum of |v_r|^2

It is 1 where all ranks hold the same and 1/P where they hold noise alone. Both sums are taken over a few
elements, drawn anew in every exchange: of residuals in one (for the preview), of gradients in the next (for
the length of steps).
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

# One element in so many is sampled, within these bounds: samples cost little of what a small model sends.
FEWEST, MOST, APART = 16, 256, 8192
# The average is over the last tenth of all measurements (one in two steps), within these bounds: ranks'
# gradients agree less and less, fast at first, so that a longer one lags and a shorter one is noise (ADR 41).
SHORTEST, LONGEST, PART = 25, 500, 10


@dataclass(frozen=True, slots=True)
class Coherence:
    """Both sums, over samples and, with falling weight, over exchanges. All ranks have the same bits."""

    numerator: float = 0.0  # P |mean v|^2
    denominator: float = 0.0  # sum over ranks of |v|^2
    samples: float = 0.0  # elements that the denominator is a sum over

    @property
    def size(self) -> float:
        """Root mean square of an element of v; 0 before anything was measured."""
        return math.sqrt(self.denominator / self.samples) if self.samples > 0.0 else 0.0

    def share(self, world: int) -> float:
        """a; 1 before anything was measured."""
        if not self.denominator > 0.0:
            return 1.0
        return min(max(self.numerator / self.denominator, 1.0 / world), 1.0)

    def among(self, old: int, new: int) -> Coherence:
        """Return what another number of ranks would have measured, each with as much noise of its own. One
        rank alone cannot tell noise from gradient."""
        if old == 1 or not self.denominator > 0.0:
            return Coherence()
        signal = (self.share(old) * old - 1.0) / (old - 1)
        denominator = self.denominator * new / old
        return Coherence((signal + (1.0 - signal) / new) * denominator, denominator, self.samples * new / old)

    def after(self, measured: NDArray[np.float64], world: int, step: int, samples: int = 0) -> Coherence:
        """The average with the `squares` of one more exchange, a row a unit, of so many samples of each rank.
        Squares that overflow are ignored."""
        numerator, denominator = measured.sum(0).tolist()
        if not math.isfinite(numerator + denominator):
            return self
        past = 1.0 - 1.0 / min(max(SHORTEST, step // 2 / PART), LONGEST)
        return Coherence(
            past * self.numerator + numerator / world,
            past * self.denominator + denominator,
            past * self.samples + samples * world,
        )


def sample_count(n: int) -> int:
    return min(MOST, max(FEWEST, n // APART))


def sample_indices(sizes: Sequence[int], step: int) -> list[Host]:
    """Sorted indices into each of some vectors of these sizes, drawn as if they were one."""
    ends = np.cumsum(sizes)
    n = int(ends[-1])
    drawn = np.sort(np.random.default_rng(step).integers(max(1, n), size=sample_count(n) if n else 0))
    parts = np.split(drawn, np.searchsorted(drawn, ends)[:-1])
    return [part - (end - size) for part, end, size in zip(parts, ends.tolist(), sizes, strict=True)]


def probe(residual: Vector, step: int) -> Tensor:
    """The samples of a residual in this step, then the sum of their squares."""
    if not residual.numel():
        return torch.zeros(1, dtype=residual.dtype, device=residual.device)
    (indices,) = sample_indices([residual.numel()], step)
    return with_square(residual.at(indices, to_device(indices, torch.int64, residual.device)))


def with_square(values: Tensor) -> Tensor:
    return torch.cat([values, values.square().sum()[None]])


def squares(total: Tensor) -> Tensor:
    """Return the square of the sums and the sum of the squares, of probes that were summed over ranks."""
    total = total.double()
    return torch.stack([total[:-1].square().sum(), total[-1]])
