"""The residual of one unit: what this rank has not sent yet.

Stage, then commit. Accumulation writes to a second buffer and commit swaps the two, so that a step which
fails or is skipped leaves the residual as it was, bit for bit. Memory: 2 n elements besides the gradient.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from gradsieve.feedback.units import Unit, parts_of
from gradsieve.kernels import accumulate
from gradsieve.types import Sparse


class Residual:
    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.kept = torch.zeros(unit.n, dtype=unit.dtype, device=unit.device)
        self._staged = torch.empty_like(self.kept)

    def accumulate(self, gradients: Mapping[str, Tensor], scale: float = 1.0) -> tuple[Tensor, bool]:
        """acc = scale e + g, where `scale` takes the residual to the units of the gradient; whether it is
        finite."""
        good = True
        for slot in self.unit.sparse:
            here = slice(slot.start, slot.stop)
            good &= accumulate(self.kept[here], gradients[slot.name], scale, self._staged[here])
        return self._staged, good

    def without_gradient(self) -> Tensor:
        """acc = e, where this rank's gradient cannot be used."""
        return self._staged.copy_(self.kept)

    def commit(self, spent: Sparse) -> None:
        """e = acc - spent."""
        spent.subtract_from(self._staged)
        self.kept, self._staged = self._staged, self.kept

    def by_kind(self) -> dict[str, dict[str, Tensor]]:
        return {"residual": parts_of(self.kept, self.unit.sparse)}
