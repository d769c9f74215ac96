"""A rank's own model beside the one that all ranks share.

    w   the shared model: the same bits on every rank
    e   what this rank's steps moved and the others have not been told
    x   the model this rank trains: x = w - a e, where a is the preview

    accumulate   e += (w - a e) - x      what the optimizer moved since x was last written
    settle       w -= update / P;  e -= spent;  x = w - a e

The law: P w - sum over ranks of e is changed by the optimizers alone, not by the exchange; with a = 1 that is
the sum of the ranks' models. Where an exchange fails, what was to be sent is still in e; x is then written
anew (`reopen`), or what the optimizer moved would be counted again.

Memory: 2 n elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from gradsieve.feedback.units import Slot, Unit, parts_of
from gradsieve.kernels import is_finite
from gradsieve.types import Sparse

_PIECE = 1 << 17


class LocalSteps:
    def __init__(self, unit: Unit, parameters: Mapping[str, Tensor]) -> None:
        self.unit = unit
        self.preview = 1.0
        """With which x was last written."""
        self._counted = False
        """Whether what the optimizer moved is in e already, while x was not yet written anew."""
        self.shared = _concatenate(unit, unit.sparse, parameters)
        self.kept = torch.zeros_like(self.shared)
        self.shared_dense = _concatenate(unit, unit.dense, parameters)

    def accumulate(self, parameters: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """e, and the differences of the dense slots, which are exchanged in full."""
        for here, own in self._pieces(parameters):
            written = torch.sub(self.shared[here], self.kept[here], alpha=self.preview)
            self.kept[here] += _moved(written, own)
        dense = torch.empty_like(self.shared_dense)
        for slot in self.unit.dense:
            here = slice(slot.start, slot.stop)
            dense[here] = _moved(self.shared_dense[here], parameters[slot.name])
        self._counted = True
        return self.kept, dense

    def settle(
        self,
        update: Sparse,
        spent: Sparse,
        dense_mean: Tensor,
        parameters: Mapping[str, Tensor],
        world: int,
        preview: float,
    ) -> None:
        Sparse(update.indices, update.values / world, update.numel).subtract_from(self.shared)
        spent.subtract_from(self.kept)
        self.shared_dense -= dense_mean
        self.preview = preview
        self._write(parameters)
        for slot in self.unit.dense:
            parameters[slot.name].copy_(self.shared_dense[slot.start : slot.stop])

    def reopen(self, parameters: Mapping[str, Tensor]) -> None:
        """After `accumulate`, where nothing came of the exchange: x holds the preview of all that waits."""
        if self._counted:
            self._write(parameters)

    def _write(self, parameters: Mapping[str, Tensor]) -> None:
        for here, own in self._pieces(parameters):
            own.copy_(torch.sub(self.shared[here], self.kept[here], alpha=self.preview))
        self._counted = False

    def _pieces(self, parameters: Mapping[str, Tensor]) -> Iterator[tuple[slice, Tensor]]:
        """The sparse vector, and this rank's model, in pieces that a processor's cache can hold."""
        for slot in self.unit.sparse:
            own = parameters[slot.name]
            for begin in range(0, slot.numel, _PIECE):
                piece = own[begin : begin + _PIECE]
                yield slice(slot.start + begin, slot.start + begin + piece.numel()), piece

    def by_kind(self) -> dict[str, dict[str, Tensor]]:
        shared = parts_of(self.shared, self.unit.sparse) | parts_of(self.shared_dense, self.unit.dense)
        return {"shared": shared, "residual": parts_of(self.kept, self.unit.sparse)}


def _moved(written: Tensor, now: Tensor) -> Tensor:
    """What the optimizer did to a parameter; where it overflowed, nothing.

    A narrow parameter holds what was written rounded: that is not a step.
    """
    moved = written.to(now.dtype).to(written.dtype) - now
    return moved if is_finite(moved) else moved.nan_to_num_(0.0, 0.0, 0.0)


def _concatenate(unit: Unit, slots: tuple[Slot, ...], parameters: Mapping[str, Tensor]) -> Tensor:
    parts = [parameters[slot.name].to(unit.dtype) for slot in slots]
    return torch.cat(parts) if parts else torch.empty(0, dtype=unit.dtype, device=unit.device)
