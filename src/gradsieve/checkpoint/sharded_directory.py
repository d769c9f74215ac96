"""A checkpoint of all shards of all hosts, in a folder that all ranks see.

    manifest-1.4.json                             version, shards, step, model, inner manifests' SHA-256
    step000000120-save1.4-shard00001-of-00002/    what the ranks that hold shard 1 had (`directory.py`)

The ranks that exchange with each other write a checkpoint of their own; when all shards have, one rank writes
the manifest over them. Until then the checkpoint before is whole, as each save has folders of its own, by its
stamp (`fencing.py`). Read by one expression, as the inner ones are, and naming no paths.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from gradsieve.checkpoint import directory as files
from gradsieve.checkpoint import fencing
from gradsieve.checkpoint.directory import Manifest
from gradsieve.checkpoint.fencing import BEFORE, Stamp
from gradsieve.checkpoint.state import MOST_RANKS
from gradsieve.comm.ops import AllGather
from gradsieve.consensus.handshake import as_bytes, as_text
from gradsieve.errors import GradsieveError, Malformed, MismatchError, RefusedError
from gradsieve.replica.shards import ShardedReplica, Shards
from gradsieve.types import Program

_TEXT = """{{
 "format": "gradsieve checkpoint of shards",
 "version": {version},
 "term": {term},
 "number": {number},
 "shards": {shards},
 "step": {step},
 "parameters": "{parameters}",
 "sha256": "{hashes}"
}}
"""


def _reading(text: str, version: int) -> re.Pattern[bytes]:
    values = dict.fromkeys(("term", "number", "shards", "step"), "V")
    pattern = re.escape(text.format(**values, version=version, parameters="H", hashes="H"))
    return re.compile(pattern.replace(r":\ V", r":\ (\d{1,15})").replace('"H"', '"([0-9a-f]*)"').encode())


_READ = _reading(_TEXT, 2)
_READ_1 = _reading(re.sub(r' "(?:term|number)": .*\n', "", _TEXT), 1)
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
    stamp: Stamp

    def inner(self, folder: Path, shard: int) -> Path:
        return folder / _name(self.step, self.stamp, shard, self.shards)

    def manifest_of(self, folder: Path, shard: int) -> Manifest:
        """Of one shard, if it is the one that was saved with the others."""
        inner = self.inner(folder, shard)
        if _hash(inner, self.stamp) != self.hashes[_HEX * shard : _HEX * (shard + 1)]:
            raise Malformed(f"{inner / self.stamp.manifest} is not what was saved with the other shards")
        manifest = files.read_manifest(inner, self.stamp)
        if manifest.step != self.step:
            raise Malformed(f"{inner} is of step {manifest.step}, not {self.step}")
        return manifest


def save(replica: ShardedReplica, folder: Path, claim: Callable[[Path], Stamp], optimizers: bool) -> None:
    """On all shards of all hosts or, as far as whoever loads can see, on none."""
    stamp = files.agreed_stamp(replica, folder, partial(_claimed, replica, claim))
    step, shards = replica.pipeline.step, replica.shards
    inner = folder / _name(step, stamp, shards.rank, shards.count)
    problem: Exception | None = None
    mine = "0" * _HEX
    try:
        files.write_checkpoint(replica, inner, stamp, optimizers)
        mine = _hash(inner, stamp)
    except Exception as error:  # whatever it is, the other shards wait for the outcome
        problem = error
    outcome = f"{replica.where}: {files.KEPT}"
    hashes = agreed(replica, outcome, problem, mine)
    try:
        if shards.rank == 0 and replica.rank == 0:
            _commit(folder, Whole(shards.count, step, hash_of(shards), hashes, stamp))
    except Exception as error:
        problem = error
    lacking = f"{outcome}: host 0 could not write {folder / stamp.manifest}"
    try:
        vote = _vote(replica, stamp, problem is None, lacking)
        replica.engine.run(vote, "the manifest over all shards", replica.device)
    except MismatchError as error:  # the host's other shards wait for the outcome
        problem = problem or error
    agreed(replica, outcome, problem, mine)


def _claimed(replica: ShardedReplica, claim: Callable[[Path], Stamp], folder: Path) -> Stamp:
    """By shard 0 of host 0, for all of that host's."""
    stamp, problem = BEFORE, None
    if replica.shards.rank == 0:
        try:
            stamp = claim(folder)
        except Exception as error:  # whatever it is, the other shards wait for the outcome
            problem = error
    first, *_ = agreed(replica, files.KEPT, problem, f"{stamp} ").split()
    return Stamp(*map(int, first.split(".")))


def agreed(replica: ShardedReplica, outcome: str, problem: Exception | None, mine: str = "") -> str:
    """What every shard of this host says, end to end; raises on all of them where one has a problem."""
    said = mine if problem is None else f"{type(problem).__name__}: {problem}"
    row = as_bytes(("+" if problem is None else "-") + said, replica.device)
    texts = [as_text(each) for each in replica.shards.gather(row)]
    if isinstance(problem, GradsieveError):
        raise problem
    if problem is not None:
        raise RefusedError(f"{outcome}: {said}") from problem
    refused = [shard for shard, text in enumerate(texts) if not text.startswith("+")]
    if refused:
        raise RefusedError(f"{outcome}: shard {refused[0]} refused: {texts[refused[0]][1:]}")
    return "".join(text[1:] for text in texts)


def read_whole(folder: Path, shards: Shards) -> Whole:
    stamp = fencing.manifests(folder)[0]
    path = folder / stamp.manifest
    content = files.read_bytes(path, _MOST)
    found = (_READ_1 if stamp == BEFORE else _READ).fullmatch(content)
    if found is None:
        raise Malformed(f"{path} is not the manifest of a checkpoint of shards")
    *stamped, count, step, parameters, hashes = found.groups()
    if stamped and Stamp(*map(int, stamped)) != stamp:
        raise Malformed(f"{path} is another manifest under its name")
    if not 1 <= int(count) <= MOST_RANKS or len(hashes) != _HEX * int(count):
        raise Malformed(f"{path} does not name a folder for each of {int(count)} shards")
    if parameters.decode() != hash_of(shards):
        raise Malformed(f"{folder} holds a checkpoint of another model")
    return Whole(int(count), int(step), parameters.decode(), hashes.decode(), stamp)


def hash_of(shards: Shards) -> str:
    parts = shards.parts.items()
    whole = [(name, tuple(part.held.shape), str(part.held.dtype)) for name, part in parts]
    return hashlib.sha256(repr(whole).encode()).hexdigest()


def _commit(folder: Path, whole: Whole) -> None:
    text = _TEXT.format(
        version=2,
        term=whole.stamp.term,
        number=whole.stamp.number,
        shards=whole.shards,
        step=whole.step,
        parameters=whole.parameters,
        hashes=whole.hashes,
    )
    missing = [name for shard in range(whole.shards) if not (name := whole.inner(folder, shard)).is_dir()]
    if missing:
        raise Malformed(f"rank 0 does not see {missing[0]}: all ranks have to share that folder")
    files.write_manifest(folder, whole.stamp, text, keeps_last=False)


def _vote(replica: ShardedReplica, stamp: Stamp, is_written: bool, lacking: str) -> Program[None]:
    """Raises on every host where one could not write."""
    row = [int(is_written), replica.pipeline.step, *stamp, files.Ballot.SHARDS]
    rows = yield AllGather(torch.tensor(row, dtype=torch.int64, device=replica.device))
    files.check_saves(replica, stamp, files.Ballot.SHARDS, rows[:, 1:].tolist())
    if not rows[:, 0].all():
        raise RefusedError(lacking)


def _name(step: int, stamp: Stamp, shard: int, shards: int) -> str:
    save = "" if stamp == BEFORE else f"-save{stamp}"
    return f"step{step:09}{save}-shard{shard:05}-of-{shards:05}"


def _hash(inner: Path, stamp: Stamp) -> str:
    return hashlib.sha256(files.read_bytes(inner / stamp.manifest, _MOST)).hexdigest()
