"""Units of exchange: which parameters travel together; small ones dense, in units of their own.

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
    """A parameter's place in its unit."""

    name: str
    numel: int
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.numel


@dataclass(frozen=True, slots=True)
class Unit:
    """Parameters that are exchanged together, in the order in which backward produces their gradients."""

    slots: tuple[Slot, ...]
    dtype: torch.dtype  # of sums: float32, or float64 for double parameters
    device: torch.device
    is_dense: bool = False  # small tensors, which need no selection

    @property
    def sizes(self) -> list[int]:
        return [slot.numel for slot in self.slots]

    @property
    def n(self) -> int:
        return sum(self.sizes)


def parts_of(vector: Tensor, slots: Iterable[Slot]) -> dict[str, Tensor]:
    """Return views of a unit's vector, by parameter name."""
    return {slot.name: vector[slot.start : slot.stop] for slot in slots}


def by_slot(slots: tuple[Slot, ...], update: Sparse) -> Iterator[tuple[Slot, Tensor | slice, Tensor]]:
    """Yield the update in the slots that it overlaps: where, relative to the slot, and what."""
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
    """Return all elements in the order in which they lie in memory, as DDP's buckets hold them."""
    return tensor.as_strided((tensor.numel(),), (1,))


def shaped_like(flat: Tensor, parameter: Tensor) -> Tensor:
    """Return a flat vector in memory order, seen with the parameter's shape."""
    return flat.as_strided(parameter.shape, parameter.stride(), flat.storage_offset())


def _is_dense(tensor: Tensor) -> bool:
    """Whether there are no gaps and no overlaps: an expanded or sliced tensor has some."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return not tensor.numel() or (span == tensor.numel() and 0 not in strides_that_count(tensor))


def strides_that_count(tensor: Tensor) -> list[int]:
    """Return the strides of dimensions longer than 1: the others' lead nowhere."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def make_units(parameters: Iterable[tuple[str, Tensor]], cap_bytes: int, small: int) -> list[Unit]:
    """Lay out parameters in reverse order (backward's), with a new unit whenever the one before holds
    `cap_bytes`. Tensors below `small` elements, and all vectors, are in dense units, which come last: they
    cost little and accuracy needs them. With 0 there are none.
    """
    open_units: dict[tuple[torch.dtype, torch.device, bool], list[Slot]] = {}
    units: list[Unit] = []
    for name, parameter in reversed(list(parameters)):
        if not parameter.is_floating_point():
            raise ConfigError(
                f"parameter {name!r} is {parameter.dtype}: only floating-point gradients can be exchanged"
            )
        if not _is_dense(parameter):
            raise ConfigError(f"parameter {name!r} has gaps or overlaps in memory; make it contiguous first")
        dtype = torch.float64 if parameter.dtype == torch.float64 else torch.float32
        kind = dtype, parameter.device, parameter.numel() < small or (bool(small) and parameter.ndim < 2)
        slots = open_units.setdefault(kind, [])
        slots.append(Slot(name, parameter.numel(), slots[-1].stop if slots else 0))
        if slots[-1].stop * dtype.itemsize >= cap_bytes:
            units.append(Unit(tuple(open_units.pop(kind)), *kind))
    units += [Unit(tuple(slots), *kind) for kind, slots in open_units.items()]
    return sorted(units, key=lambda unit: unit.is_dense)
