"""A checkpoint of another number of shards: what each of the present shards would have had.

FSDP cuts a parameter along its first dimension into shards of ceil(rows / shards) rows. A shard is therefore
a stretch of memory, and any other cut is made of stretches of it. Old shards are read one after the other,
those alone that have rows of this shard.

Models, residuals and the optimizer's moments, which hold for elements, are loaded row by row. Thresholds and
partitions, which were found for a shard as a whole, are initialised again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Shard

from gradsieve.checkpoint import state
from gradsieve.checkpoint.rank_state import RankState
from gradsieve.errors import Malformed
from gradsieve.replica import Replica


def rows_of(rows: int, shard: int, shards: int) -> range:
    """Return which rows of a parameter a shard has."""
    length = -(-rows // shards)
    return range(min(rows, length * shard), min(rows, length * (shard + 1)))


def overlap(one: range, other: range) -> range:
    start = max(one.start, other.start)
    return range(start, max(start, min(one.stop, other.stop)))


@dataclass(frozen=True, slots=True)
class Cut:
    """Map rows of old shards to rows of this one."""

    held: Mapping[str, Any]  # whole parameters, of DTensor
    shard: int
    shards: int
    old: int  # number of shards that saved

    def __post_init__(self) -> None:
        for name, held in self.held.items():
            if getattr(held, "placements", ()) != (Shard(0),):
                raise Malformed(
                    f"{self.old} shards saved the checkpoint, and {self.shards} load it, which works for "
                    f"parameters sharded along the first dimension, not for {name!r}"
                )

    def ours(self, held: Tensor) -> range:
        return rows_of(len(held), self.shard, self.shards)

    def theirs(self, held: Tensor, shard: int) -> range:
        return rows_of(len(held), shard, self.old)

    def shape(self, held: Tensor, shard: int) -> tuple[int, ...]:
        """Return the shape of a parameter's part in an old shard."""
        return len(self.theirs(held, shard)), *held.shape[1:]

    def needed(self) -> list[int]:
        """Return the old shards with rows of this one; one at least."""
        found = {
            shard
            for shard in range(self.old)
            if any(overlap(self.ours(held), self.theirs(held, shard)) for held in self.held.values())
        }
        return sorted(found) or [0]

    def empty_models(self) -> dict[str, Tensor]:
        """Return memory for the models of this shard, by kind/parameter."""
        out = {}
        for name, held in self.held.items():
            wide = torch.float64 if held.dtype == torch.float64 else torch.float32
            for kind, dtype in (("shared", wide), ("mark", wide), ("own", held.dtype)):
                shape = len(self.ours(held)), *held.shape[1:]
                out[f"{kind}/{name}"] = torch.empty(shape, dtype=dtype, device="cpu")
        return out

    def fill(
        self, memories: Mapping[str, Tensor], stored: Mapping[str, Tensor], rank: int, shard: int
    ) -> None:
        """Copy this shard's rows, by kind/parameter, out of an old shard's file."""
        like = {}
        for key, memory in memories.items():
            held = self.held[key.partition("/")[2]]
            like[key] = torch.empty(self.shape(held, shard), dtype=memory.dtype, device="meta")
        for key, found in state.memories_in(stored, rank, like).items():
            self._copy(memories[key], found, self.held[key.partition("/")[2]], shard)

    def fill_optimizer(self, optimizer: Any, target: dict[str, Any], old: dict[str, Any], shard: int) -> None:
        """Copy this shard's rows of all moments; what is no row of a parameter is the first shard's."""
        order = [p for group in optimizer.param_groups for p in group["params"]]
        for index, moments in old["state"].items():
            if index not in range(len(order)) or index not in target["state"] or type(moments) is not dict:
                raise Malformed("an optimizer in the checkpoint has other parameters")
            held, mine = order[index], target["state"][index]
            for key, moment in moments.items():
                if isinstance(moment, Tensor) and moment.shape == self.shape(held, shard):
                    empty = moment.new_empty(len(self.ours(held)), *held.shape[1:])
                    self._copy(mine.setdefault(key, empty), moment, held, shard)
                else:
                    mine.setdefault(key, moment)

    def _copy(self, target: Tensor, source: Tensor, held: Tensor, shard: int) -> None:
        ours, theirs = self.ours(held), self.theirs(held, shard)
        if both := overlap(ours, theirs):
            there = source.reshape(len(theirs), -1)[both.start - theirs.start : both.stop - theirs.start]
            target.view(len(ours), -1)[both.start - ours.start : both.stop - ours.start] = there


def part_of(
    replica: Replica,
    read: Callable[[int], Mapping[str, Tensor]],
    rank: int,
    shards: int,
    world: int,
    with_optimizers: bool,
) -> RankState:
    """Return the part of old rank `rank`; `read` gives the file of one of its `shards`."""
    cut = Cut(replica.held, replica.shard, replica.shards_of_host, shards)
    memories = {key: torch.empty_like(view) for key, view in replica.pipeline.kept().items()}
    optimizers: Sequence[Any] = ()
    for shard in cut.needed():
        stored = read(shard)
        step, figures = state.head_of(replica, stored, rank, world)
        cut.fill(memories, stored, rank, shard)
        found = state.optimizers_of(replica, stored, rank) if with_optimizers else []
        optimizers = optimizers or [{**old, "state": {index: {} for index in old["state"]}} for old in found]
        for optimizer, target, state_of in zip(replica.optimizers, optimizers, found, strict=False):
            cut.fill_optimizer(optimizer, target, state_of, shard)
    fresh = replica.pipeline.init_states(world)
    samples = [torch.zeros_like(vector) for vector in replica.pipeline.samples()]
    return RankState(step, figures, memories, fresh, samples, optimizers=optimizers)
