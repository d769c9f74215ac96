"""A checkpoint of all shards of all hosts, in a folder that all ranks see.

    manifest.json                              version, shards, step, model, every inner manifest's SHA-256
    step000000120-shard00001-of-00002/         what the ranks that hold shard 1 had (`folder.py`)

The ranks that exchange with each other write a checkpoint of their own; when all shards have, one rank writes
the manifest over them. Until then the checkpoint before is whole, as each step has folders of its own. Read
by one expression, as the inner ones are, and naming no paths.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from gradsieve.comm.ops import AllGather
from gradsieve.errors import Malformed, MismatchError
from gradsieve.integrations import folder as files
from gradsieve.integrations.agreement import as_bytes, as_text
from gradsieve.integrations.folder import MANIFEST, Manifest
from gradsieve.integrations.saving import MOST_RANKS
from gradsieve.types import Program

if TYPE_CHECKING:
    from gradsieve.integrations.hsdp import HsdpSync
    from gradsieve.integrations.shards import Shards

_TEXT = """{{
 "format": "gradsieve checkpoint of shards",
 "version": 1,
 "shards": {shards},
 "step": {step},
 "parameters": "{parameters}",
 "sha256": "{hashes}"
}}
"""
_READ = re.compile(
    re.escape(_TEXT.format(shards="V", step="V", parameters="H", hashes="H"))
    .replace(r":\ V", r":\ (\d{1,15})")
    .replace('"H"', '"([0-9a-f]*)"')
    .encode()
)
_OURS = re.compile(r"step\d{9,15}-shard\d{5,7}-of-\d{5,7}")
_MOST = 1 << 27
_HEX = 64


@dataclass(frozen=True, slots=True)
class Whole:
    """What the manifest over all shards says."""

    shards: int
    step: int
    parameters: str
    """A hash of names, whole shapes and types."""
    hashes: str
    """SHA-256 of every shard's manifest, end to end."""

    def inner(self, folder: Path, shard: int) -> Path:
        return folder / _name(self.step, shard, self.shards)

    def manifest_of(self, folder: Path, shard: int) -> Manifest:
        """Of one shard, if it is the one that was saved with the others."""
        inner = self.inner(folder, shard)
        if _hash(inner) != self.hashes[_HEX * shard : _HEX * (shard + 1)]:
            raise Malformed(f"{inner / MANIFEST} is not what was saved with the other shards")
        manifest = files.read_manifest(inner)
        if manifest.step != self.step:
            raise Malformed(f"{inner} is of step {manifest.step}, not {self.step}")
        return manifest


def save(sync: HsdpSync, folder: Path, optimizers: bool) -> None:
    """On all shards of all hosts or, as far as whoever loads can see, on none."""
    step, shards = sync.pipeline.step, sync.shards
    inner = folder / _name(step, shards.rank, shards.count)
    problem: Exception | None = None
    mine = "0" * _HEX
    try:
        files.save(sync, inner, optimizers)
        mine = _hash(inner)
    except Exception as error:  # whatever it is, the other shards wait to be told
        problem = error
    outcome = f"rank {sync.engine.rank}, step {step}: nothing was saved; the checkpoint before is as it was"
    hashes = agreed(sync, outcome, problem, mine)
    try:
        if shards.rank == 0 and sync.engine.rank == 0:
            _commit(folder, Whole(shards.count, step, hash_of(shards), hashes))
    except Exception as error:
        problem = error
    lacking = f"{outcome}: host 0 could not write {folder / MANIFEST}"
    try:
        sync.engine.run(_told(sync, problem is None, lacking), "the manifest over all shards", sync.device)
    except MismatchError as error:  # the host's other shards wait to be told
        problem = problem or error
    agreed(sync, outcome, problem, mine)


def agreed(sync: HsdpSync, outcome: str, problem: Exception | None, mine: str = "") -> str:
    """What every shard of this host says, end to end; raises on all of them where one has a problem."""
    said = mine if problem is None else f"{type(problem).__name__}: {problem}"
    row = as_bytes(("+" if problem is None else "-") + said, sync.device)
    texts = [as_text(each) for each in sync.shards.gather(row)]
    if problem is not None:
        raise problem
    refused = [shard for shard, text in enumerate(texts) if not text.startswith("+")]
    if refused:
        raise MismatchError(f"{outcome}: shard {refused[0]} refused: {texts[refused[0]][1:]}")
    return "".join(text[1:] for text in texts)


def read_whole(folder: Path, shards: Shards) -> Whole:
    content = files.read_bytes(folder / MANIFEST, _MOST)
    found = _READ.fullmatch(content)
    if found is None:
        raise Malformed(f"{folder / MANIFEST} is not the manifest of a checkpoint of shards")
    count, step, parameters, hashes = found.groups()
    if not 1 <= int(count) <= MOST_RANKS or len(hashes) != _HEX * int(count):
        raise Malformed(f"{folder / MANIFEST} does not name a folder for each of {int(count)} shards")
    if parameters.decode() != hash_of(shards):
        raise Malformed(f"{folder} holds a checkpoint of another model")
    return Whole(int(count), int(step), parameters.decode(), hashes.decode())


def hash_of(shards: Shards) -> str:
    parts = shards.parts.items()
    whole = [(name, tuple(part.held.shape), str(part.held.dtype)) for name, part in parts]
    return hashlib.sha256(repr(whole).encode()).hexdigest()


def _commit(folder: Path, whole: Whole) -> None:
    text = _TEXT.format(
        shards=whole.shards, step=whole.step, parameters=whole.parameters, hashes=whole.hashes
    )
    kept = {_name(whole.step, shard, whole.shards) for shard in range(whole.shards)}
    there = {entry.name for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)}
    if missing := sorted(kept - there):
        raise Malformed(f"rank 0 does not see {missing[0]} in {folder}: all ranks have to share that folder")
    files.write(folder, "manifest.part", [memoryview(text.encode())])
    for name in there - kept:
        if _OURS.fullmatch(name):
            with contextlib.suppress(OSError):
                shutil.rmtree(folder / name)


def _told(sync: HsdpSync, is_written: bool, lacking: str) -> Program[None]:
    """Raises on every host where one could not write."""
    row = torch.tensor([int(is_written), sync.pipeline.step], dtype=torch.int64, device=sync.device)
    rows = yield AllGather(row)
    files.check_steps(sync, rows[:, 1].tolist())
    if not rows[:, 0].all():
        raise MismatchError(lacking)


def _name(step: int, shard: int, shards: int) -> str:
    return f"step{step:09}-shard{shard:05}-of-{shards:05}"


def _hash(inner: Path) -> str:
    return hashlib.sha256(files.read_bytes(inner / MANIFEST, _MOST)).hexdigest()
