"""A checkpoint of another number of shards: what each of these would have had.

FSDP cuts a parameter along its first dimension into shards of ceil(rows / shards) rows, so that a shard is a
stretch of memory and any other cut is made of stretches of it. Old shards are read one after the other, those
alone that have rows of ours.

What holds for elements (both models, the residual, the optimizer's memory) is loaded row by row. What was
found for a shard as a whole, thresholds and partitions, is initialised again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Shard

from gradsieve.checkpoint import directory as files
from gradsieve.checkpoint import state
from gradsieve.checkpoint.sharded_directory import Whole, read_whole
from gradsieve.errors import Malformed
from gradsieve.feedback import checkpoint
from gradsieve.pipeline.parts import RankState, stand_in
from gradsieve.replica.shards import ShardedReplica, Shards
from gradsieve.wire.tensor_file import TensorFile


def rows_of(rows: int, shard: int, shards: int) -> range:
    """Of a parameter with so many, those in a shard."""
    each = -(-rows // shards)
    return range(min(rows, each * shard), min(rows, each * (shard + 1)))


class OldShards:
    def __init__(self, folder: Path, whole: Whole, shards: Shards) -> None:
        for name, part in shards.parts.items():
            if part.held.placements != (Shard(0),):
                raise Malformed(
                    f"{whole.shards} shards saved this and {shards.count} load it, which works for "
                    f"parameters sharded along the first dimension, not for {name!r}"
                )
        self.shards, self._folder, self._whole = shards, folder, whole
        self._manifests = {shard: whole.manifest_of(folder, shard) for shard in self._needed()}
        worlds = {manifest.world for manifest in self._manifests.values()}
        if len(worlds) != 1:
            raise Malformed(f"shards in {folder} were saved by different numbers of hosts")
        self.world = worlds.pop()

    def _needed(self) -> list[int]:
        """Old shards with rows of ours; one at least."""
        held = [part.held for part in self.shards.parts.values()]
        found = {
            shard
            for shard in range(self._whole.shards)
            if any(_both(self._ours(len(each)), self._theirs(len(each), shard)) for each in held)
        }
        return sorted(found) or [0]

    def _ours(self, rows: int) -> range:
        return rows_of(rows, self.shards.rank, self.shards.count)

    def _theirs(self, rows: int, shard: int) -> range:
        return rows_of(rows, shard, self._whole.shards)

    def files(self, rank: int) -> Iterator[tuple[int, TensorFile]]:
        """What old rank `rank` had of every shard that is needed here."""
        for shard, manifest in self._manifests.items():
            yield shard, files.read_shard(self._whole.inner(self._folder, shard), manifest, rank)

    def fill(self, target: dict[str, Tensor], stored: TensorFile, rank: int, shard: int) -> None:
        """Copy what a file has of our rows, by kind/parameter. Where the residual was empty, both models are
        the shared one."""
        bare = f"rank{rank}/{state.BARE}" in stored
        for key, ours in target.items():
            kind, _, name = key.partition("/")
            held = self.shards.parts[name].held
            shape = len(self._theirs(len(held), shard)), *held.shape[1:]
            from_shared = bare and kind in ("own", "mark")
            dtype = target[f"shared/{name}"].dtype if from_shared else ours.dtype
            source = f"rank{rank}/shared/{name}" if from_shared else f"rank{rank}/{key}"
            found = checkpoint.take(stored, source, shape, dtype)
            if from_shared:
                found = found.to(held.dtype)
            self._copy(ours, found, len(held), shard)

    def fill_optimizers(self, target: list[Any], states: list[Any], optimizers: Any, shard: int) -> None:
        """Likewise what optimizers remember of elements; the rest is the first shard's."""
        target.extend(_like(state) for state in states[len(target) :])
        for optimizer, into, one in zip(optimizers, target, states, strict=True):
            order = [each for group in optimizer.param_groups for each in group["params"]]
            for index, fields in one["state"].items():
                if index not in range(len(order)) or not isinstance(fields, dict):
                    raise Malformed("an optimizer in the checkpoint has other parameters")
                held = order[index]
                shape = len(self._theirs(len(held), shard)), *held.shape[1:]
                for key, each in fields.items():
                    if not isinstance(each, Tensor) or tuple(each.shape) != shape:
                        into["state"][index].setdefault(key, each)
                        continue
                    ours = len(self._ours(len(held))), *held.shape[1:]
                    mine = into["state"][index].setdefault(key, each.new_empty(ours))
                    self._copy(mine, each, len(held), shard)

    def _copy(self, target: Tensor, source: Tensor, rows: int, shard: int) -> None:
        ours, theirs = self._ours(rows), self._theirs(rows, shard)
        both = _both(ours, theirs)
        if both:
            there = source.reshape(len(theirs), -1)[both.start - theirs.start : both.stop - theirs.start]
            target.view(len(ours), -1)[both.start - ours.start : both.stop - ours.start] = there


def offer_of(replica: ShardedReplica, folder: Path, whole: Whole, optimizers: bool) -> state.Offer:
    """What this rank needs of a checkpoint of other shards, checked."""
    old = OldShards(folder, whole, replica.shards)
    source, states = stand_in(replica.rank, old.world), list[Any]()

    def read(rank: int) -> RankState:
        heads, memories = [], {key: torch.empty_like(view) for key, view in replica.pipeline.kept().items()}
        for shard, stored in old.files(rank):
            heads.append(state.head_of(replica, stored, rank, old.world))
            old.fill(memories, stored, rank, shard)
            if optimizers and rank == source:
                found = state.optimizers_of(replica, stored, rank, stored.bytes)
                old.fill_optimizers(states, found, replica.optimizers, shard)
        step, figures = heads[0]
        fresh = [replica.scheme.init_state(unit.sizes, old.world) for unit in replica.pipeline.units]
        noted = [torch.zeros_like(each) for each in replica.pipeline.noted()]
        return RankState(step, figures, memories, fresh, noted)

    offer = state.gathered(replica, old.world, read)
    return replace(offer, optimizers=states) if optimizers else offer


def waiting_in(folder: Path, shards: Shards) -> Mapping[str, Tensor]:
    """The model of a checkpoint of any numbers of hosts and shards, with all residuals, as far as it is in
    these shards: w - mean e."""
    old = OldShards(folder, read_whole(folder, shards), shards)
    out: dict[str, Tensor] = {}
    for rank in range(old.world):
        memories = {}
        for name, part in shards.parts.items():
            wide = part.local.dtype if part.local.dtype == torch.float64 else torch.float32
            for kind, dtype in (("shared", wide), ("mark", wide), ("own", part.local.dtype)):
                memories[f"{kind}/{name}"] = torch.empty(part.local.shape, dtype=dtype, device="cpu")
        for shard, stored in old.files(rank):
            old.fill(memories, stored, rank, shard)
        for name in shards.parts:
            waits = memories[f"mark/{name}"] - memories[f"own/{name}"]
            model = out.setdefault(name, memories[f"shared/{name}"])
            model -= torch.where(waits.isfinite(), waits, 0.0) / old.world
    return out


def _both(one: range, other: range) -> range:
    start = max(one.start, other.start)
    return range(start, max(start, min(one.stop, other.stop)))


def _like(state: Any) -> dict[str, Any]:
    if not isinstance(state, dict) or not isinstance(state.get("state"), dict):
        raise Malformed("an optimizer in the checkpoint has no state")
    return {**state, "state": {index: {} for index in state["state"]}}
