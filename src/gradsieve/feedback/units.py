"""Units of exchange: which parameters travel together, and which of them travel dense.

Units are laid out once, from the order and sizes of the parameters alone. DDP rebuilds its buckets after the
first iteration (and again in a resumed process); units do not move with them, so neither do residuals,
partitions or the order of collectives.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gradsieve.errors import ConfigError
from gradsieve.types import Sparse


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter's place in its unit."""

    name: str
    numel: int
    sparse: bool
    start: int
    """First position in the unit's sparse vector, or in its dense one."""

    @property
    def stop(self) -> int:
        return self.start + self.numel


@dataclass(frozen=True, slots=True)
class Unit:
    """Parameters that are exchanged together, in the order in which backward produces their gradients."""

    slots: tuple[Slot, ...]
    dtype: torch.dtype
    """In which gradients are accumulated and summed: float32, or float64 for double parameters."""
    device: torch.device

    @property
    def sparse(self) -> tuple[Slot, ...]:
        return tuple(slot for slot in self.slots if slot.sparse)

    @property
    def dense(self) -> tuple[Slot, ...]:
        return tuple(slot for slot in self.slots if not slot.sparse)

    @property
    def names_of_sparse(self) -> frozenset[str]:
        return frozenset(slot.name for slot in self.sparse)

    @property
    def sizes(self) -> list[int]:
        """Of the tensors in the sparse vector."""
        return [slot.numel for slot in self.sparse]

    @property
    def n(self) -> int:
        """Length of the sparse vector."""
        return sum(self.sizes)


def parts_of(vector: Tensor, slots: Iterable[Slot]) -> dict[str, Tensor]:
    """Views of a unit's sparse (or dense) vector, by parameter name."""
    return {slot.name: vector[slot.start : slot.stop] for slot in slots}


def by_slot(slots: tuple[Slot, ...], update: Sparse) -> Iterator[tuple[Slot, Tensor | slice, Tensor]]:
    """The update in each slot: where, relative to the slot, and what. Of a run, in slots that it overlaps."""
    values = update.values
    if update.indices is None:
        for slot in slots:
            first, last = max(update.start, slot.start), min(update.stop, slot.stop)
            if first < last:
                where = slice(first - slot.start, last - slot.start)
                yield slot, where, values[first - update.start : last - update.start]
        return
    stops = np.searchsorted(update.on_host(), [slot.stop for slot in slots])
    start = 0
    for slot, stop in zip(slots, stops.tolist(), strict=True):
        if start < stop:
            yield slot, update.indices[start:stop] - slot.start, values[start:stop]
        start = stop


def flat_view(tensor: Tensor) -> Tensor:
    """All elements in the order in which they lie in memory, as DDP's buckets hold them."""
    return tensor.as_strided((tensor.numel(),), (1,))


def shaped_like(flat: Tensor, parameter: Tensor) -> Tensor:
    """The reverse: a flat vector in memory order, seen with the parameter's shape."""
    return flat.as_strided(parameter.shape, parameter.stride(), flat.storage_offset())


def _is_dense(tensor: Tensor) -> bool:
    """No gaps and no overlaps: channels_last is, an expanded or sliced tensor is not."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return not tensor.numel() or (span == tensor.numel() and 0 not in strides_that_count(tensor))


def strides_that_count(tensor: Tensor) -> list[int]:
    """Those of dimensions longer than 1: the others' lead nowhere."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def make_units(parameters: Iterable[tuple[str, Tensor]], cap_bytes: int, small: int) -> list[Unit]:
    """Parameters in reverse order (backward's), a new unit whenever the one before holds `cap_bytes`.

    Tensors below `small` elements, and all vectors, go dense: they cost little and accuracy needs them. With
    0, nothing does.
    """
    open_units: dict[tuple[torch.dtype, torch.device], list[tuple[str, Tensor]]] = {}
    held: dict[tuple[torch.dtype, torch.device], int] = {}
    units: list[Unit] = []
    for name, parameter in reversed(list(parameters)):
        if not parameter.is_floating_point():
            raise ConfigError(
                f"parameter {name!r} is {parameter.dtype}: only floating-point gradients can be exchanged"
            )
        if not _is_dense(parameter):
            raise ConfigError(f"parameter {name!r} has gaps or overlaps in memory; make it contiguous first")
        dtype = torch.float64 if parameter.dtype == torch.float64 else torch.float32
        kind = dtype, parameter.device
        open_units.setdefault(kind, []).append((name, parameter))
        held[kind] = held.get(kind, 0) + parameter.numel() * dtype.itemsize
        if held[kind] >= cap_bytes:
            units.append(_unit(open_units.pop(kind), *kind, small))
            del held[kind]
    units.extend(_unit(members, dtype, device, small) for (dtype, device), members in open_units.items())
    return units


def _unit(members: list[tuple[str, Tensor]], dtype: torch.dtype, device: torch.device, small: int) -> Unit:
    length = {True: 0, False: 0}
    slots = []
    for name, parameter in members:
        sparse = not small or (parameter.ndim > 1 and parameter.numel() >= small)
        slots.append(Slot(name, parameter.numel(), sparse, length[sparse]))
        length[sparse] += parameter.numel()
    return Unit(tuple(slots), dtype, device)
