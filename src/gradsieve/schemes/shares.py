"""How k and the work of a step are divided: into whole numbers, by speed, among owners of partitions.

Fractions go round robin (golden-ratio rounding), so that no part is passed over for ever if there are fewer
elements to send than parts.

There are as many partitions as ranks, or fewer where rows would hold next to nothing: a row has a header and
some slack, whatever is in it. Owners then lie evenly among the ranks and move on by one with every step, so
that every rank owns every partition once in P steps, however many there are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gradsieve.errors import ConfigError
from gradsieve.types import Host, to_host

# Ranks up to which all of them own a partition: so many headers are next to nothing.
MANY = 16
# Elements that a row should hold.
_ROW = 64


def phase(step: int) -> float:
    """Says where rounding begins in this step: in 0..1, and never long near where it was."""
    return step * 0.6180339887498949 % 1.0


def quota(weights: Tensor, total: float, step: int) -> Tensor:
    """Splits `total` in proportion to `weights` into whole numbers."""
    edges = (weights.double().cumsum(0) / weights.sum() * total + phase(step)).floor().long()
    return torch.diff(edges, prepend=edges.new_zeros(1))


def evenly(total: int, parts: int) -> list[int]:
    """Splits `total` into `parts` whole numbers; the first ones get what is left over."""
    return [total // parts + (part < total % parts) for part in range(parts)]


def check_speeds(speeds: tuple[float, ...] | None) -> None:
    if speeds is not None and not all(math.isfinite(speed) and speed > 0 for speed in speeds):
        raise ConfigError(f"speeds must be positive numbers, one for each rank, not {speeds!r}")


def shares_of_work(speeds: tuple[float, ...] | None, world: int) -> Tensor:
    """Returns each rank's part of all work, in rank order; equal parts where no speeds are given."""
    if speeds is None:
        return torch.full((world,), 1.0 / world, dtype=torch.float64, device="cpu")
    if len(speeds) != world:
        raise ConfigError(f"speeds has {len(speeds)} numbers for {world} ranks: give one for each rank")
    given = torch.tensor(speeds, dtype=torch.float64, device="cpu")
    return given / given.sum()


def partitions(k: int, world: int) -> int:
    """Returns how many partitions there are for k elements a step."""
    return world if world <= MANY else min(world, max(1, k // _ROW))


@dataclass(frozen=True, slots=True)
class Owners:
    world: int
    partitions: int
    step: int

    def part_of(self, rank: int) -> int | None:
        """Returns the partition of a rank, if it has one."""
        part, offset = divmod((rank + self.step) % self.world, self._apart)
        return part if not offset and part < self.partitions else None

    @property
    def first(self) -> int:
        """Returns the partition of the first owner in rank order; those after it have the next ones."""
        part = -(-(self.step % self.world) // self._apart)
        return part if part < self.partitions else 0

    def ranks(self) -> Host:
        """Returns the owners in their order."""
        rows = torch.arange(self.partitions, dtype=torch.int64, device="cpu")
        parts = (rows + self.first) % self.partitions
        return to_host((self._apart * parts - self.step) % self.world)

    @property
    def _apart(self) -> int:
        return self.world // self.partitions
