"""A rank's own model beside the one that all ranks share.

    w   the shared model: the same bits on every rank
    x   the model this rank trains: its parameters, which its optimizer steps
    m   the mark that x is measured from
    e   what waits: m - x, all that this rank's steps moved and the others have not been told

    waiting   e, wherever it is asked for: nothing is accumulated, a step is in x the moment it is made
    settle    where elements were sent: w -= update / P, e -= spent
    fold      in one window of the vector a step: x = w - a e, and m follows; a is the preview

A window comes round every WINDOWS steps, so that x has the last few steps in full and of what is older the
part a. The law: P w - sum over ranks of e is changed by the optimizers alone; neither the exchange, whether
it succeeds or not, nor folding changes it.

Memory: 2 n elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradsieve.feedback.units import Slot, Unit, by_slot, parts_of
from gradsieve.kernels import fold, select, waiting, waiting_above
from gradsieve.kernels.fast import window
from gradsieve.types import Host, Sparse

WINDOWS = 6
"""Windows of the vector, one of which is folded in a step."""
_PIECE = 1 << 17
"""Elements that stay in a processor's cache while all is done to them."""


class LocalSteps:
    def __init__(self, unit: Unit, parameters: Mapping[str, Tensor]) -> None:
        self.unit = unit
        self.shared = _concatenate(unit, unit.sparse, parameters)
        self.mark = self.shared.clone()
        self.shared_dense = _concatenate(unit, unit.dense, parameters)
        self.mark_dense = self.shared_dense.clone()

    def waiting(self, parameters: Mapping[str, Tensor]) -> Waiting:
        return Waiting(self, parameters)

    def waiting_dense(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """Of the dense slots, which are exchanged in full."""
        out = torch.empty_like(self.mark_dense)
        for slot in self.unit.dense:
            here = slice(slot.start, slot.stop)
            waiting(self.mark_dense[here], parameters[slot.name], out[here])
        return out

    def settle(
        self,
        update: Sparse,
        spent: Sparse,
        dense_mean: Tensor,
        parameters: Mapping[str, Tensor],
        world: int,
        preview: float,
    ) -> None:
        """Take over what an exchange gave."""
        if update.indices is None:
            self._settle_everything(update.values, parameters, world)
        else:
            self._settle_some(update, spent, parameters, world, preview)
        self.shared_dense -= dense_mean
        for slot in self.unit.dense:
            here = slice(slot.start, slot.stop)
            # A narrow parameter holds it rounded: that is not a step, so the mark is rounded too.
            self.mark_dense[here] = parameters[slot.name].copy_(self.shared_dense[here])

    def _settle_everything(self, total: Tensor, parameters: Mapping[str, Tensor], world: int) -> None:
        """All that waited was told: x = m = w."""
        for slot in self.unit.sparse:
            for begin in range(0, slot.numel, _PIECE):
                end = min(begin + _PIECE, slot.numel)
                here = slice(slot.start + begin, slot.start + end)
                self.shared[here] -= total[here] / world
                self.mark[here] = parameters[slot.name][begin:end].copy_(self.shared[here])

    def _settle_some(
        self, update: Sparse, spent: Sparse, parameters: Mapping[str, Tensor], world: int, preview: float
    ) -> None:
        left = self.waiting(parameters).of(spent) - spent.values
        if spent.indices is not update.indices:
            self._write(replace(spent, values=left), self._shared_at(spent), parameters, preview)
            left = self.waiting(parameters).of(update)
        # Two roundings, not a fused one: replicas on unlike processors must stay the same bits.
        assert update.indices is not None
        shared = self._shared_at(update) - update.values / world
        self.shared.index_copy_(0, update.indices, shared)
        self._write(replace(update, values=left), shared, parameters, preview)

    def fold(self, parameters: Mapping[str, Tensor], preview: float, window: int) -> None:
        """In one of the windows, x = w - a e."""
        n = self.unit.n
        for here, own in self.pieces(parameters, n * window // WINDOWS, n * (window + 1) // WINDOWS):
            fold(self.shared[here], own, self.mark[here], preview)

    def _shared_at(self, part: Sparse) -> Tensor:
        assert part.indices is not None
        return self.shared.index_select(0, part.indices)

    def _write(self, left: Sparse, shared: Tensor, parameters: Mapping[str, Tensor], preview: float) -> None:
        """x and m where e is now `left`."""
        own = torch.sub(shared, left.values, alpha=preview)
        for slot, indices, values in by_slot(self.unit.sparse, replace(left, values=own)):
            assert indices is not None
            parameter = parameters[slot.name]
            narrow = values.to(parameter.dtype)
            parameter.index_copy_(0, indices, narrow)
            if narrow.dtype != values.dtype:
                values.copy_(narrow)
        assert left.indices is not None
        self.mark.index_copy_(0, left.indices, own.add_(left.values))

    def pieces(
        self, parameters: Mapping[str, Tensor], start: int, stop: int
    ) -> Iterator[tuple[slice, Tensor]]:
        """The vector from `start` to `stop` and this rank's model there, slot by slot."""
        for slot in self.unit.sparse:
            first, last = max(start, slot.start), min(stop, slot.stop)
            if first < last:
                yield slice(first, last), parameters[slot.name][first - slot.start : last - slot.start]

    def by_kind(self) -> dict[str, dict[str, Tensor]]:
        shared = parts_of(self.shared, self.unit.sparse) | parts_of(self.shared_dense, self.unit.dense)
        mark = parts_of(self.mark, self.unit.sparse) | parts_of(self.mark_dense, self.unit.dense)
        return {"shared": shared, "mark": mark}


@dataclass(frozen=True, slots=True)
class Waiting:
    """e of one unit, a `Vector`: computed where it is read."""

    local: LocalSteps
    parameters: Mapping[str, Tensor]

    @property
    def device(self) -> torch.device:
        return self.local.mark.device

    @property
    def dtype(self) -> torch.dtype:
        return self.local.mark.dtype

    def numel(self) -> int:
        return self.local.mark.numel()

    def between(self, start: int, stop: int) -> Tensor:
        out = self.local.mark.new_empty(stop - start)
        for here, own in self.local.pieces(self.parameters, start, stop):
            waiting(self.local.mark[here], own, out[here.start - start : here.stop - start])
        return out

    def select(
        self, start: int, stop: int, threshold: float, capacity: int, phase: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        if self.device.type != "cpu":
            return select(self.between(start, stop), threshold, capacity, phase)
        found, there = [torch.empty(0, dtype=torch.long)], [self.local.mark.new_empty(0)]
        for here, own in self.local.pieces(self.parameters, start, stop):
            indices, values = waiting_above(self.local.mark[here], own, threshold)
            found.append(indices.add_(here.start - start))
            there.append(values)
        return window(torch.cat(found), torch.cat(there), stop - start, threshold, capacity, phase)

    def at(self, host: Host, indices: Tensor) -> Tensor:
        mark = self.local.mark.index_select(0, indices)
        own = torch.empty_like(mark)
        for slot, places, values in by_slot(self.local.unit.sparse, Sparse(indices, own, self.numel(), host)):
            assert places is not None
            values.copy_(self.parameters[slot.name].index_select(0, places))
        waiting(mark, own, own)
        return own

    def of(self, part: Sparse) -> Tensor:
        """Where `part` has elements."""
        assert part.indices is not None
        return self.at(part.on_host(), part.indices)


def _concatenate(unit: Unit, slots: tuple[Slot, ...], parameters: Mapping[str, Tensor]) -> Tensor:
    parts = [parameters[slot.name].to(unit.dtype) for slot in slots]
    return torch.cat(parts) if parts else torch.empty(0, dtype=unit.dtype, device=unit.device)
