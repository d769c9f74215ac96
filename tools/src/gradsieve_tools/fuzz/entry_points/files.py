"""Checkpoints: a writer in the folder decides every byte of a file, and how many there are.

The manifest of an altered file has that file's SHA-256, as one who forges both would write it: otherwise the
hash alone would refuse everything. What is read is all that a load reads before ranks vote on it.
"""

from __future__ import annotations

import hashlib
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from gradsieve.checkpoint import files
from gradsieve.checkpoint import state as saving
from gradsieve.checkpoint.fencing import FencingToken
from gradsieve.checkpoint.rank_state import ranks_to_read
from gradsieve.checkpoint.tensors import pieces, tensors_in
from gradsieve.comm.engine import Engine
from gradsieve.replica import Replica
from gradsieve_tools.fuzz.entry_points.entry_point import EntryPoint
from gradsieve_tools.fuzz.entry_points.exchanges import WORLD
from gradsieve_tools.fuzz.entry_points.pipelines import Rank, gradients, trained, with_budget

_FEWER = 3  # ranks that load what WORLD ranks saved: the first reads two files and adds them
_LARGE = 1 << 20  # elements of a file that makes one copy too many exceed the memory cap
_MANY = 600  # tensors of a file that is mostly header
_TOKEN = FencingToken(1, 1)


class _Optimizer:
    """State in the shape of Adam's, without torch's optimizers, which take seconds to load."""

    param_groups: tuple[Any, ...] = ()

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._state = {
            number: {
                "step": torch.tensor(4.0, dtype=torch.float32, device="cpu"),
                "exp_avg": tensor.clone(),
                "exp_avg_sq": tensor**2,
            }
            for number, tensor in enumerate(tensors.values())
        }

    def state_dict(self) -> dict[str, Any]:
        group = {"lr": 1e-3, "betas": (0.9, 0.999), "amsgrad": False, "params": list(self._state)}
        return {"state": self._state, "param_groups": [group]}


@dataclass
class _Seat:
    rank: int
    world: int


def loader(rank: Rank) -> Replica:
    pipeline = rank.pipeline
    pipeline.optimizers = cast("Any", [_Optimizer(rank.tensors)])
    seat = _Seat(pipeline.rank, pipeline.world)
    return Replica(cast("Engine", seat), pipeline.parameters, pipeline)


def of_tensors() -> Iterator[EntryPoint]:
    """The layout by itself."""
    for name, build in _KINDS.items():
        yield EntryPoint(f"tensors of {name}", _shards(build)[1], (8, 240, WORLD), _enter_tensors)
    tiny = {
        f"a/{number}": torch.tensor([number % 7], dtype=torch.int64, device="cpu") for number in range(_MANY)
    }
    yield EntryPoint("many tiny tensors", (_written(tiny),), (_MANY,), _enter_tensors)


def of_folders() -> Iterator[EntryPoint]:
    """A manifest, and files behind it."""
    place = _Folder()
    for name, build in _KINDS.items():
        ranks, shards = _shards(build)
        manifest = place.manifest(loader(ranks[0]), shards)
        if name == next(iter(_KINDS)):
            fewer = replace(manifest, world=2, files=manifest.files[:2])
            honest = (files.as_text(manifest), files.as_text(fewer))
            edges = (WORLD, saving.MOST_RANKS, files.VERSION)
            yield EntryPoint("manifest", tuple(map(str.encode, honest)), edges, place.enter_manifest)
        for world in (WORLD, _FEWER):
            replica = loader(ranks[0] if world == WORLD else build(0, world))
            enter = place.enter_shard(replica, manifest, shards)
            yield EntryPoint(
                f"file of {name}, loaded by {world} ranks", shards, (8, 240, WORLD, _FEWER), enter
            )


def large() -> Iterator[EntryPoint]:
    one = {"rank0/own/x": torch.ones(_LARGE, dtype=torch.float32, device="cpu")}
    yield EntryPoint("a large file", (_written(one),), (_LARGE,), _enter_tensors)


_KINDS: dict[str, Callable[[int, int], Rank]] = {
    "steps of stripes": lambda rank, world: with_budget("stripes", rank, world),
    "gradients of exdyna": lambda rank, world: gradients("exdyna", rank, world),
}


def _shards(build: Callable[[int, int], Rank]) -> tuple[list[Rank], tuple[bytes, ...]]:
    """Ranks after a few steps, and what each of them would write."""
    ranks = [build(rank, WORLD) for rank in range(WORLD)]
    trained(ranks)
    return ranks, tuple(_written(saving.shard_of(loader(rank), True)) for rank in ranks)


def _written(tensors: Mapping[str, Tensor]) -> bytes:
    return b"".join(pieces(tensors))


def _enter_tensors(forged: bytearray) -> None:
    header = 8 + int.from_bytes(forged[:8], "little")
    if header + sum(tensor.nbytes for tensor in tensors_in(forged).values()) != len(forged):
        raise AssertionError("bytes of no tensor, or of two")


class _Folder:
    def __init__(self) -> None:
        self._whole = tempfile.TemporaryDirectory(prefix="gradsieve-fuzz-")
        self._path = Path(self._whole.name)

    def manifest(self, replica: Replica, shards: tuple[bytes, ...]) -> files.Manifest:
        listed = tuple(_listed(shard) for shard in shards)
        step, scheme, model = (
            replica.pipeline.step,
            type(replica.scheme).__name__,
            files.model_of(replica.held),
        )
        return files.Manifest(*_TOKEN, 1, len(shards), step, scheme, model, True, "", listed)

    def _write_manifest(self, text: bytes | bytearray) -> None:
        (self._path / _TOKEN.manifest).write_bytes(text)

    def enter_manifest(self, forged: bytearray) -> None:
        self._write_manifest(forged)
        found = files.read_manifest(self._path)
        names = {found.file_of(rank) for rank in range(min(found.world, 64))}
        if any("/" in name or ".." in name for name in names) or not 0 < found.world <= saving.MOST_RANKS:
            raise AssertionError(f"a manifest that names {names}")

    def enter_shard(
        self, replica: Replica, manifest: files.Manifest, shards: tuple[bytes, ...]
    ) -> Callable[[bytearray], None]:
        """Rank 0's file is the forged one."""
        honest = {rank: shards[rank] for rank in ranks_to_read(0, replica.world, manifest.world) if rank}

        def enter(forged: bytearray) -> None:
            forger = replace(manifest, files=(_listed(forged), *manifest.files[1:]))
            self._write_manifest(files.as_text(forger).encode())
            for rank, shard in honest.items():
                path = self._path / forger.file_of(rank)
                if not path.exists():
                    path.write_bytes(shard)
            path = self._path / forger.file_of(0)
            path.write_bytes(forged)
            try:
                _check_candidate(replica, files.candidate_of(replica, self._path, optimizers=True))
            finally:
                path.unlink()

        return enter


def _listed(content: bytes | bytearray) -> str:
    return f"{len(content)} {hashlib.sha256(content).hexdigest()}"


def _check_candidate(replica: Replica, candidate: saving.LoadCandidate) -> None:
    part, kept = candidate.part, replica.pipeline.kept()
    if {*part.memories} != {*kept} or part.step < 0 or not all(map(math.isfinite, part.figures.values())):
        raise AssertionError("not what this replica keeps")
    for key, view in kept.items():
        if part.memories[key].shape != view.shape or part.memories[key].dtype != view.dtype:
            raise AssertionError(f"{key} is of {part.memories[key].shape}, not {view.shape}")
