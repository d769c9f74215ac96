"""A checkpoint of another number of shards: what each of these would have had.

FSDP cuts a parameter along its first dimension into shards of ceil(rows / shards) rows, so that a shard is a
stretch of memory and any other cut is made of stretches of it. Old shards are read one after the other, those
alone that have rows of ours.

What holds for elements (both models, the residual, the optimizer's memory) is loaded row by row. What was
found for a shard as a whole, thresholds and partitions, is initialised again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Shard

from gradsieve.checkpoint import files, state
from gradsieve.checkpoint.fields import take
from gradsieve.checkpoint.files import Manifest
from gradsieve.checkpoint.rank_state import RankState, residual_in, stand_in
from gradsieve.errors import Malformed
from gradsieve.replica.shards import ShardedReplica, Shards


def rows_of(rows: int, shard: int, shards: int) -> range:
    """Of a parameter with so many, those in a shard."""
    each = -(-rows // shards)
    return range(min(rows, each * shard), min(rows, each * (shard + 1)))


class OldShards:
    def __init__(self, folder: Path, manifest: Manifest, shards: Shards) -> None:
        for name, part in shards.parts.items():
            if part.held.placements != (Shard(0),):
                raise Malformed(
                    f"{manifest.shards} shards saved this and {shards.count} load it, which works for "
                    f"parameters sharded along the first dimension, not for {name!r}"
                )
        self.shards, self._folder, self._manifest = shards, folder, manifest

    def _needed(self) -> list[int]:
        """Old shards with rows of ours; one at least."""
        held = [part.held for part in self.shards.parts.values()]
        found = {
            shard
            for shard in range(self._manifest.shards)
            if any(_both(self._ours(len(each)), self._theirs(len(each), shard)) for each in held)
        }
        return sorted(found) or [0]

    def _ours(self, rows: int) -> range:
        return rows_of(rows, self.shards.rank, self.shards.count)

    def _theirs(self, rows: int, shard: int) -> range:
        return rows_of(rows, shard, self._manifest.shards)

    def files(self, rank: int) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """What old rank `rank` had of every shard that is needed here."""
        for shard in self._needed():
            yield shard, files.read_shard(self._folder, self._manifest, rank, shard)

    def fill(self, target: dict[str, Tensor], stored: Mapping[str, Tensor], rank: int, shard: int) -> None:
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
            found = take(stored, source, shape, dtype)
            if from_shared:
                found = found.to(held.dtype)
            self._copy(ours, found, len(held), shard)

    def fill_optimizers(
        self, target: list[Any], states: list[Any], optimizers: Sequence[Any], shard: int
    ) -> None:
        """Likewise what optimizers remember of elements; the rest is the first shard's."""
        for old in states[len(target) :]:
            target.append({**old, "state": {index: {} for index in old["state"]}})
        for optimizer, into, old in zip(optimizers, target, states, strict=True):
            order = [p for group in optimizer.param_groups for p in group["params"]]
            for index, moments in old["state"].items():
                if index not in range(len(order)) or index not in into["state"] or type(moments) is not dict:
                    raise Malformed("an optimizer in the checkpoint has other parameters")
                held, mine = order[index], into["state"][index]
                shape = len(self._theirs(len(held), shard)), *held.shape[1:]
                for key, moment in moments.items():
                    if not isinstance(moment, Tensor) or tuple(moment.shape) != shape:
                        mine.setdefault(key, moment)
                        continue
                    ours = len(self._ours(len(held))), *held.shape[1:]
                    self._copy(mine.setdefault(key, moment.new_empty(ours)), moment, len(held), shard)

    def _copy(self, target: Tensor, source: Tensor, rows: int, shard: int) -> None:
        ours, theirs = self._ours(rows), self._theirs(rows, shard)
        both = _both(ours, theirs)
        if both:
            there = source.reshape(len(theirs), -1)[both.start - theirs.start : both.stop - theirs.start]
            target.view(len(ours), -1)[both.start - ours.start : both.stop - ours.start] = there


def newest_offer(replica: ShardedReplica, folder: Path, optimizers: bool) -> state.LoadCandidate:
    """What this rank needs of a checkpoint of any number of shards, checked."""
    manifest = files.read_manifest(folder)
    if manifest.shards == replica.shards.count:
        return files.offer_of(replica, folder, manifest, optimizers)
    files.refuse_other(replica, manifest, optimizers)
    old = OldShards(folder, manifest, replica.shards)
    source, states = stand_in(replica.rank, manifest.world), list[Any]()

    def read(rank: int) -> RankState:
        memories = {key: torch.empty_like(view) for key, view in replica.pipeline.kept().items()}
        for shard, stored in old.files(rank):
            step, figures = state.head_of(replica, stored, rank, manifest.world)
            old.fill(memories, stored, rank, shard)
            if optimizers and rank == source:
                size, _ = manifest.expected(rank, shard)
                found = state.optimizers_of(replica, stored, rank, size)
                old.fill_optimizers(states, found, replica.optimizers, shard)
        fresh = [replica.scheme.init_state(unit.sizes, manifest.world) for unit in replica.pipeline.units]
        noted = [torch.zeros_like(vector) for vector in replica.pipeline.noted()]
        return RankState(step, figures, memories, fresh, noted)

    offer = state.gathered(replica, manifest.world, read)
    return replace(offer, optimizers=states) if optimizers else offer


def waiting_in(folder: Path, shards: Shards) -> Mapping[str, Tensor]:
    """The model of a checkpoint of any numbers of hosts and shards, with all residuals, as far as it is in
    these shards: w - mean e."""
    manifest = files.read_manifest(folder)
    files.refuse_other_model({name: part.held for name, part in shards.parts.items()}, manifest)
    old = OldShards(folder, manifest, shards)
    out: dict[str, Tensor] = {}
    for rank in range(manifest.world):
        memories = {}
        for name, part in shards.parts.items():
            wide = part.local.dtype if part.local.dtype == torch.float64 else torch.float32
            for kind, dtype in (("shared", wide), ("mark", wide), ("own", part.local.dtype)):
                memories[f"{kind}/{name}"] = torch.empty(part.local.shape, dtype=dtype, device="cpu")
        for shard, stored in old.files(rank):
            old.fill(memories, stored, rank, shard)
        for name in shards.parts:
            model = out.setdefault(name, memories[f"shared/{name}"])
            model -= residual_in(memories, name) / manifest.world
    return out


def _both(one: range, other: range) -> range:
    start = max(one.start, other.start)
    return range(start, max(start, min(one.stop, other.stop)))
