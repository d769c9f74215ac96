"""EF21 (arXiv 2106.05203): what all ranks believe a rank's gradient to be, instead of what it has not sent.

    acc = g - h        send part of it
    h += spent         this rank's estimate
    H += update        the sum of all estimates, the same on every rank; the optimizer is given H / P

The law: H is the sum of the ranks' h, after every commit. There is no residual, so nothing grows stale; but
what the optimizer sees of an element is its gradient when it was last sent. Memory: 3 n elements.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from gradsieve.feedback.units import Unit, parts_of
from gradsieve.kernels import accumulate
from gradsieve.types import Sparse


class Estimate:
    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.kept = torch.zeros(unit.n, dtype=unit.dtype, device=unit.device)
        self.total = torch.zeros_like(self.kept)
        self._acc = torch.empty_like(self.kept)
        self._scale = 1.0

    def accumulate(self, gradients: Mapping[str, Tensor], scale: float = 1.0) -> tuple[Tensor, bool]:
        """acc = g - scale h, where `scale` takes the estimate to the units of the gradient; whether it is
        finite."""
        self._scale, good = scale, True
        for slot in self.unit.sparse:
            here = slice(slot.start, slot.stop)
            good &= accumulate(self.kept[here], gradients[slot.name], -scale, self._acc[here])
        return self._acc, good

    def without_gradient(self) -> Tensor:
        """Nothing to say, where this rank's gradient cannot be used."""
        return self._acc.zero_()

    def released(self, update: Sparse) -> Sparse:
        """All of H with this update in it."""
        return Sparse.full(self.total * self._scale + update.to_dense())

    def commit(self, spent: Sparse, released: Sparse) -> None:
        self.kept.mul_(self._scale).add_(spent.to_dense())
        self.total.copy_(released.values)

    def by_kind(self) -> dict[str, dict[str, Tensor]]:
        slots = self.unit.sparse
        return {"estimate": parts_of(self.kept, slots), "total": parts_of(self.total, slots)}
