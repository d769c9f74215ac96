"""A checkpoint in a folder that all ranks see: one file of tensors a rank, and a manifest that names them.

    manifest.json                         version, ranks, step, scheme, layout, every file's SHA-256
    rank00003-of-00004-<hash>.safetensors   what rank 3 had (`wire/tensor_file.py`)

A rank's file is written under another name, forced to disk and renamed; as its name has its hash, it takes no
older one's place. Rank 0 then writes the manifest in the same way. Until that is renamed the checkpoint
before is whole, whatever breaks; afterwards the new one is, and the old one's files are removed.

A manifest names no paths: a file's name follows from rank, number of ranks and hash. Symbolic links and what
is not a plain file are not opened. It is JSON, but is read by one expression, as it is written here and not
otherwise.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from gradsieve.comm.ops import AllGather
from gradsieve.errors import Malformed, MismatchError
from gradsieve.integrations import saving
from gradsieve.sync.parts import Part, stand_in
from gradsieve.types import Program
from gradsieve.wire import tensor_file
from gradsieve.wire.tensor_file import TensorFile

if TYPE_CHECKING:
    from gradsieve.integrations.gradient_sync import GradientSync

VERSION = 1
MANIFEST = "manifest.json"
_MANIFEST_MOST = 1 << 27
_HASH, _STEP = 32, 8
"""Bytes."""
_MINE = 1 + _STEP
"""Where a rank's hash begins in its word on a checkpoint."""
_OURS = re.compile(r"rank\d{5,7}-of-\d{5,7}-[0-9a-f]{16}\.safetensors|(rank\d{5,7}|manifest)\.part")
_TEXT = """{{
 "format": "gradsieve checkpoint",
 "version": {version},
 "world": {world},
 "step": {step},
 "scheme": "{scheme}",
 "layout": "{layout}",
 "optimizers": {optimizers},
 "sha256": "{hashes}"
}}
"""
_NUMBER, _HEX = r"(\d{1,15})", r"([0-9a-f]*)"
_READ = re.compile(
    re.escape(
        _TEXT.format(version="V", world="V", step="V", scheme="S", layout="H", optimizers="V", hashes="H")
    )
    .replace(r":\ V", rf":\ {_NUMBER}")
    .replace('"S"', r'"([A-Za-z0-9_]{1,64})"')
    .replace('"H"', f'"{_HEX}"')
    .encode()
)


@dataclass(frozen=True, slots=True)
class Manifest:
    world: int
    step: int
    scheme: str
    layout: str
    """A hash of units, parameters, shapes and types."""
    optimizers: bool
    hashes: str
    """SHA-256 of every rank's file, end to end."""

    def hash_of(self, rank: int) -> str:
        return self.hashes[2 * _HASH * rank : 2 * _HASH * (rank + 1)]

    def file_of(self, rank: int) -> str:
        return _file(rank, self.world, self.hash_of(rank))


def as_text(manifest: Manifest) -> str:
    return _TEXT.format(
        version=VERSION,
        world=manifest.world,
        step=manifest.step,
        scheme=manifest.scheme,
        layout=manifest.layout,
        optimizers=int(manifest.optimizers),
        hashes=manifest.hashes,
    )


# -- out ------------------------------------------------------------------------------------------------


def save(sync: GradientSync, folder: Path, optimizers: bool) -> None:
    """On all ranks or, as far as whoever loads can see, on none."""
    saving.come_to_rest(sync, "save()")
    rank, world = sync.engine.rank, sync.engine.world
    when = f"after step {sync.pipeline.step}"
    mine, problem = bytes(_HASH), None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        mine = _write_shard(sync, folder, optimizers)
    except Exception as error:  # whatever it is, the other ranks wait to be told
        problem = error
    try:
        hashes = sync.engine.run(_told(sync, mine, problem), f"the vote on a checkpoint {when}", sync.device)
        manifest = Manifest(
            world, sync.pipeline.step, type(sync.scheme).__name__, layout_of(sync), optimizers, hashes
        )
        if rank == 0:
            try:
                _commit(folder, manifest)
            except Exception as error:
                problem = error
        sync.engine.run(_told(sync, mine, problem), f"the vote on a manifest {when}", sync.device)
    except (Malformed, MismatchError):
        _withdraw(folder, rank, world, mine.hex())
        raise


def _write_shard(sync: GradientSync, folder: Path, optimizers: bool) -> bytes:
    tensors = saving.shard_of(sync, optimizers)
    texts = [part.numel() for key, part in tensors.items() if key.endswith("/text") and "/optimizer/" in key]
    longest = max(texts, default=0)
    room = saving.TEXT_SHARE * longest if longest > saving.TEXT_ALWAYS else 0
    rank = sync.engine.rank
    return write(folder, f"rank{rank:05}.part", tensor_file.pieces(tensors, room), rank, sync.engine.world)


def write(folder: Path, part: str, pieces: Iterable[memoryview], rank: int = -1, world: int = 0) -> bytes:
    """To the disk, then under its name; the hash. What breaks off leaves nothing behind."""
    path, found = folder / part, hashlib.sha256()
    path.unlink(missing_ok=True)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
        with open(descriptor, "wb") as stream:
            for piece in pieces:
                stream.write(piece)
                found.update(piece)
            stream.flush()
            os.fsync(stream.fileno())
        path.rename(folder / (MANIFEST if rank < 0 else _file(rank, world, found.hexdigest())))
    finally:
        path.unlink(missing_ok=True)
    _force(folder)
    return found.digest()


def _withdraw(folder: Path, rank: int, world: int, sha256: str) -> None:
    """Remove a file that was refused, so that it does not fill the disk; unless the manifest that is there
    names it: the same was saved before."""
    with contextlib.suppress(Malformed):
        manifest = read_manifest(folder)
        if manifest.world == world and manifest.hash_of(rank) == sha256:
            return
    with contextlib.suppress(OSError):
        (folder / _file(rank, world, sha256)).unlink()


def _force(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _told(sync: GradientSync, mine: bytes, problem: Exception | None) -> Program[str]:
    """All ranks' hashes, if every rank has written its file.

    A message has its step: one of an earlier save that comes again names a file which may still be there.
    """
    row = [0 if problem is not None else 1, *sync.pipeline.step.to_bytes(_STEP, "little"), *mine]
    rows = yield AllGather(torch.tensor(row, dtype=torch.uint8, device=sync.device))
    check_steps(sync, [int.from_bytes(bytes(each), "little") for each in rows[:, 1:_MINE].tolist()])
    refused = (rows[:, 0] != 1).nonzero().flatten().tolist()
    if refused:
        yield from saving.refuse(
            sync, "nothing was saved; the checkpoint before is as it was", refused, problem
        )
    return bytes(rows[:, _MINE:].flatten().tolist()).hex()


def check_steps(sync: GradientSync, steps: Sequence[int]) -> None:
    """Whether every rank's vote is one on this save."""
    now = sync.pipeline.step
    if other := [f"rank {rank} of step {step}" for rank, step in enumerate(steps) if step != now]:
        raise MismatchError(
            f"rank {sync.engine.rank}, step {now}: nothing was saved; the checkpoint before is as it was: "
            f"{', '.join(other[:4])} answered. A message of an earlier save came again, or ranks are at "
            "different steps: start again from a checkpoint"
        )


def _commit(folder: Path, manifest: Manifest) -> None:
    named = {manifest.file_of(rank) for rank in range(manifest.world)}
    there = {entry.name for entry in os.scandir(folder)}
    if missing := sorted(named - there):
        raise Malformed(
            f"rank 0 does not see {missing[0]} in {folder}, which another rank has written: the folder has "
            "to be one that all ranks share"
        )
    write(folder, "manifest.part", [memoryview(as_text(manifest).encode())])
    for name in there - named:
        if _OURS.fullmatch(name):
            with contextlib.suppress(OSError):
                (folder / name).unlink()


def _file(rank: int, world: int, sha256: str) -> str:
    return f"rank{rank:05}-of-{world:05}-{sha256[:16]}.safetensors"


def layout_of(sync: GradientSync) -> str:
    units = [[(slot.name, slot.sparse) for slot in unit.slots] for unit in sync.pipeline.units]
    tensors = [(name, tuple(p.shape), str(p.dtype)) for name, p in sync.parameters.items()]
    kinds = sorted({key.partition("/")[0] for key in sync.pipeline.kept()})
    return hashlib.sha256(repr((units, tensors, kinds)).encode()).hexdigest()


# -- in -------------------------------------------------------------------------------------------------


def offer_of(sync: GradientSync, folder: Path, optimizers: bool) -> saving.Offer:
    """What this rank needs of the checkpoint in that folder, checked."""
    manifest = read_manifest(folder)
    scheme = type(sync.scheme).__name__
    if manifest.scheme != scheme:
        raise Malformed(f"the checkpoint is of scheme {manifest.scheme}, this run's is {scheme}")
    if manifest.layout != layout_of(sync):
        raise Malformed(
            "the checkpoint is of another model, or of one cut into other units: load it with the same "
            "parameters, exchange and bucket cap"
        )
    if optimizers and not manifest.optimizers:
        raise Malformed("the checkpoint has no optimizers: load(folder, optimizers=False), if that is meant")
    source, states = stand_in(sync.engine.rank, manifest.world), []

    def read(rank: int) -> Part:
        stored = read_shard(folder, manifest, rank)
        part = saving.part_of(sync, stored, rank, manifest.world)
        if part.step != manifest.step:
            raise Malformed(f"{manifest.file_of(rank)} is of step {part.step}, not {manifest.step}")
        if optimizers and rank == source:
            states.extend(saving.optimizers_of(sync, stored, rank, stored.bytes))
        return part

    offer = saving.gathered(sync, manifest.world, read)
    return replace(offer, optimizers=states) if optimizers else offer


def read_manifest(folder: Path) -> Manifest:
    content = read_bytes(folder / MANIFEST, _MANIFEST_MOST)
    found = _READ.fullmatch(content)
    version = re.search(rb'"version": (\d{1,9}),', content[:256])
    if version is not None and int(version[1]) != VERSION:
        raise Malformed(
            f"{folder / MANIFEST} is of version {int(version[1])}; this gradsieve reads version {VERSION}"
        )
    if found is None:
        raise Malformed(f"{folder / MANIFEST} is not a manifest of a gradsieve checkpoint")
    _, world, step, scheme, layout, optimizers, hashes = found.groups()
    ranks = saving.checked_world(int(world))
    if len(hashes) != 2 * _HASH * ranks or int(optimizers) > 1:
        raise Malformed(f"{folder / MANIFEST} does not name a file for each of {ranks} ranks")
    return Manifest(ranks, int(step), scheme.decode(), layout.decode(), optimizers == b"1", hashes.decode())


def read_shard(folder: Path, manifest: Manifest, rank: int) -> TensorFile:
    path = folder / manifest.file_of(rank)
    content = read_bytes(path)
    if hashlib.sha256(content).hexdigest() != manifest.hash_of(rank):
        raise Malformed(f"{path} is not what was saved: its SHA-256 is another than the manifest's")
    try:
        return TensorFile(content)
    except Malformed as error:
        raise Malformed(f"{path}: {error}") from error


def read_bytes(path: Path, most: int | None = None) -> bytearray:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "rb", buffering=0) as stream:
            about = os.fstat(descriptor)
            if not stat.S_ISREG(about.st_mode) or (most is not None and about.st_size > most):
                raise Malformed(f"{path} is not a file of a checkpoint")
            content, done = bytearray(about.st_size), 0
            while done < len(content):
                got = stream.readinto(memoryview(content)[done:])
                if not got:
                    raise Malformed(f"{path} ended while it was read")
                done += got
            return content
    except OSError as error:
        raise Malformed(f"{path} cannot be read: {error.strerror}") from error
