"""How much of what waits on one rank is what waits on all of them: the part of it worth believing.

    e_r   what waits on rank r = what all ranks found alike + the noise of its own batches
    a     the factor that makes a e_r the best guess of the mean over ranks of e, in the least squares:

          a = sum over ranks of <e_r, mean e> / sum over ranks of |e_r|^2 = P |mean e|^2 / sum of |e_r|^2

It is 1 where all ranks hold the same and 1/P where they hold noise alone. Both sums are formed over a few
elements drawn anew in every step, the same ones on all ranks, which ride along in an all-reduce.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

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

    def after(self, totals: list[Tensor], world: int) -> Coherence:
        """With the probes of this step: of every unit, the sum over ranks of what `probe` gave."""
        alike = sum(float(total[:-1].double().square().sum()) for total in totals) / world
        every = sum(float(total[-1]) for total in totals)
        return Coherence(MEMORY * self.alike + alike, MEMORY * self.all + every)


def probe(waiting: Tensor, step: int) -> Tensor:
    """What waits at the elements that are looked at in this step, then the sum of its squares."""
    if not waiting.numel():
        return waiting.new_zeros(1)
    random = torch.Generator().manual_seed(step)
    places = torch.randint(waiting.numel(), (PROBES,), generator=random).to(waiting.device)
    values = waiting[places]
    return torch.cat([values, values.square().sum()[None]])
