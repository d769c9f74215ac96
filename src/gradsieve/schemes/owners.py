"""Who owns which partition in a step.

As many partitions as ranks, or fewer where rows would hold next to nothing: a row has a header and some
slack, whatever is in it. Owners then lie evenly among the ranks and move on by one with every step, so that
every rank owns every partition once in P steps, however many there are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gradsieve.types import Host, to_host

# Ranks up to which all of them own a partition: so many headers are next to nothing.
MANY = 16
# Elements that a row should hold.
_ROW = 64


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
