"""A checkpoint in a folder that all ranks see: one file of tensors a rank, and a manifest that names them.

    manifest-1.4.json                          version, ranks, step, scheme, layout; files' sizes and SHA-256
    rank00003-of-00004-1.4-<hash>.safetensors  what rank 3 had (`wire/tensor_file.py`)

A rank's file is written under another name, forced to disk and renamed; its name has the checkpoint's stamp
(`fencing.py`) and its hash, so that it takes no other one's place. When all ranks have written theirs and
hold the same shared model, rank 0 writes the manifest in the same way. Until that is renamed the checkpoint
before is whole, whatever breaks; afterwards the new one is, and the old one's files are removed.

A manifest names no paths: a file's name follows from rank, number of ranks, stamp and hash. Symbolic links
and what is not a plain file are not opened, and no file is read that has another size than the manifest says.
It is JSON, but is read by one expression, as it is written here and not otherwise.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path

import torch
from torch import Tensor

from gradsieve.checkpoint import fencing, state
from gradsieve.checkpoint.fencing import BEFORE, MANIFEST, Stamp
from gradsieve.comm.ops import AllGather
from gradsieve.consensus import replica_check
from gradsieve.consensus.handshake import differing
from gradsieve.errors import DivergenceError, Malformed, MismatchError, ProtocolError
from gradsieve.feedback.digest import digest
from gradsieve.pipeline.parts import RankState, stand_in
from gradsieve.replica.replica import Replica
from gradsieve.types import Program
from gradsieve.wire import tensor_file
from gradsieve.wire.tensor_file import TensorFile

VERSION = 2
_MANIFEST_MOST = 1 << 27
_HASH = 32
"""Bytes."""
_TEXT = """{{
 "format": "gradsieve checkpoint",
 "version": {version},
 "term": {term},
 "number": {number},
 "world": {world},
 "step": {step},
 "scheme": "{scheme}",
 "layout": "{layout}",
 "optimizers": {optimizers},
 "pair": "{pair}",
 "bytes": [{sizes}],
 "sha256": "{hashes}"
}}
"""
_NUMBER, _HEX = r"(\d{1,15})", r"([0-9a-f]*)"


def _reading(text: str) -> re.Pattern[bytes]:
    blank = dict.fromkeys(("version", "term", "number", "world", "step", "optimizers"), "V")
    hexadecimal = dict.fromkeys(("layout", "pair", "hashes"), "H")
    pattern = re.escape(text.format(**blank, **hexadecimal, scheme="S", sizes="L"))
    pattern = pattern.replace(r":\ V", rf":\ {_NUMBER}").replace('"H"', f'"{_HEX}"')
    pattern = pattern.replace('"S"', r'"([A-Za-z0-9_]{1,64})"')
    return re.compile(pattern.replace("L", r"(\d{1,15}(?:, \d{1,15})*)").encode())


_READ = _reading(_TEXT)
_READ_1 = _reading(re.sub(r' "(?:term|number|pair|bytes)": .*\n', "", _TEXT))
"""Of version 1, which had neither stamps nor sizes."""


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
    sizes: tuple[int, ...] = ()
    """Bytes of every rank's file; unknown in version 1."""
    stamp: Stamp = BEFORE
    pair: str = ""
    """What the framework's file, written with it, says: `frameworks/sidecar.py`."""

    def hash_of(self, rank: int) -> str:
        return self.hashes[2 * _HASH * rank : 2 * _HASH * (rank + 1)]

    def file_of(self, rank: int) -> str:
        return _file(rank, self.world, self.stamp, self.hash_of(rank))


def as_text(manifest: Manifest) -> str:
    return _TEXT.format(
        version=VERSION,
        term=manifest.stamp.term,
        number=manifest.stamp.number,
        world=manifest.world,
        step=manifest.step,
        scheme=manifest.scheme,
        layout=manifest.layout,
        optimizers=int(manifest.optimizers),
        pair=manifest.pair,
        sizes=", ".join(map(str, manifest.sizes)),
        hashes=manifest.hashes,
    )


# -- out ------------------------------------------------------------------------------------------------

KEPT = "nothing was saved; the checkpoint before is as it was"


_AGAIN = "Restart all ranks from that checkpoint"


class Ballot(IntEnum):
    """What a vote in a save is about: `lab chaos` replayed one of a save in the next one of the same save."""

    FILES = 1
    MANIFEST = 2
    SHARDS = 3


@dataclass(frozen=True, slots=True)
class Written:
    """What a rank sends to the others about its file."""

    size: int = 0
    sha256: bytes = bytes(_HASH)


def save(
    replica: Replica, folder: Path, claim: Callable[[Path], Stamp], optimizers: bool, pair: str = ""
) -> Stamp:
    """On all ranks or, as far as whoever loads can see, on none. With a `pair` the checkpoint before stays
    until `fencing.remove_older`, or the next save. `claim` gives rank 0 the stamp of the next checkpoint in a
    folder. No exchange is pending."""
    stamp = agreed_stamp(replica, folder, claim)
    write_checkpoint(replica, folder, stamp, optimizers, pair)
    return stamp


def agreed_stamp(replica: Replica, folder: Path, claim: Callable[[Path], Stamp]) -> Stamp:
    """Rank 0's, who asks the folder."""
    stamp, problem = BEFORE, None
    if replica.rank == 0:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            stamp = claim(folder)
        except Exception as error:  # whatever it is, the other ranks wait for the outcome
            problem = error
    when = f"the stamp of a checkpoint after step {replica.pipeline.step}"
    agreed = replica.engine.run(_stamp_of_rank_0(replica, stamp, problem), when, replica.device)
    return stamp if replica.rank == 0 else agreed  # a damaged one shows in the vote, where they differ


def _stamp_of_rank_0(replica: Replica, stamp: Stamp, problem: Exception | None) -> Program[Stamp]:
    row = torch.tensor([int(problem is None), *stamp], dtype=torch.int64, device=replica.device)
    good, term, number = (yield AllGather(row))[0].tolist()
    if not good:
        yield from state.refuse(replica, KEPT, [0], problem)
    return Stamp(term, number)


def write_checkpoint(replica: Replica, folder: Path, stamp: Stamp, optimizers: bool, pair: str = "") -> None:
    rank, world = replica.rank, replica.world
    when = f"after step {replica.pipeline.step}"
    mine, problem = Written(), None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        mine = _write_shard(replica, folder, stamp, optimizers)
    except Exception as error:  # whatever it is, the other ranks wait for the outcome
        problem = error
    try:
        vote = _vote(replica, stamp, Ballot.FILES, mine, problem, replica_check.replicated(replica))
        sizes, hashes = replica.engine.run(vote, f"the vote on a checkpoint {when}", replica.device)
        scheme, layout = type(replica.scheme).__name__, layout_of(replica)
        manifest = Manifest(
            world, replica.pipeline.step, scheme, layout, optimizers, hashes, sizes, stamp, pair
        )
        if rank == 0:
            try:
                _commit(folder, manifest)
            except Exception as error:
                problem = error
        vote = _vote(replica, stamp, Ballot.MANIFEST, mine, problem, {})
        replica.engine.run(vote, f"the vote on a manifest {when}", replica.device)
    except (Malformed, ProtocolError):
        if not (folder / stamp.manifest).exists():  # with one, the file belongs to a whole checkpoint
            with contextlib.suppress(OSError):  # so that it does not fill the disk
                (folder / _file(rank, world, stamp, mine.sha256.hex())).unlink()
        raise


def _write_shard(replica: Replica, folder: Path, stamp: Stamp, optimizers: bool) -> Written:
    tensors = state.shard_of(replica, optimizers)
    texts = [part.numel() for key, part in tensors.items() if key.endswith("/text") and "/optimizer/" in key]
    longest = max(texts, default=0)
    padding = state.TEXT_SHARE * longest if longest > state.TEXT_ALWAYS else 0
    rank, world = replica.rank, replica.world
    part = f"{_begin(rank, world, stamp)}.part"
    return write(
        folder, part, tensor_file.pieces(tensors, padding), lambda sha256: _file(rank, world, stamp, sha256)
    )


def write(folder: Path, part: str, pieces: Iterable[memoryview], name: Callable[[str], str]) -> Written:
    """To the disk, then under the name that it has by its hash. What breaks off leaves nothing behind."""
    path, found, size = folder / part, hashlib.sha256(), 0
    path.unlink(missing_ok=True)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
        with open(descriptor, "wb") as stream:
            for piece in pieces:
                stream.write(piece)
                found.update(piece)
                size += piece.nbytes
            stream.flush()
            os.fsync(stream.fileno())
        path.rename(folder / name(found.hexdigest()))
    finally:
        path.unlink(missing_ok=True)
    _force(folder)
    return Written(size, found.digest())


def write_manifest(folder: Path, stamp: Stamp, text: str, keeps_last: bool) -> None:
    """The checkpoint is whole with it. One of a run that was replaced is none, and removes nothing. Where
    this raises there is no manifest, so that the files which it names may be removed."""
    content, part = [memoryview(text.encode())], f"manifest-{stamp}.part"
    try:
        write(folder, part, content, lambda _: stamp.manifest)
        fencing.refuse_deposed(folder, stamp)
        write(folder, part, content, lambda _: MANIFEST)
    except BaseException:
        (folder / stamp.manifest).unlink(missing_ok=True)
        raise
    kept = fencing.manifests(folder)[: 2 if keeps_last else 1]
    fencing.remove_older(folder, kept[-1])


def _force(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _vote(
    replica: Replica,
    stamp: Stamp,
    ballot: Ballot,
    mine: Written,
    problem: Exception | None,
    replicated: Mapping[str, Tensor],
) -> Program[tuple[tuple[int, ...], str]]:
    """All ranks' sizes and hashes, if every rank has written its file, and what is replicated in these is the
    same: one of ranks that differ could not be loaded.

    A message has its step, its stamp and which vote it is: one of an earlier save or vote that comes again
    names a file which may still be there.
    """
    words = [mine.sha256[at : at + 8] for at in range(0, _HASH, 8)]
    row = torch.tensor(
        [
            *(int(problem is None), replica.pipeline.step, *stamp, ballot, mine.size),
            *(int.from_bytes(word, "little", signed=True) for word in words),
            int(digest(list(replicated.values()))),
        ],
        dtype=torch.int64,
        device=replica.device,
    )
    rows = yield AllGather(row)
    check_saves(replica, stamp, ballot, rows[:, 1:5].tolist())
    refused = (rows[:, 0] != 1).nonzero().flatten().tolist()
    if refused:
        yield from state.refuse(replica, KEPT, refused, problem)
    if (rows[:, -1] != rows[0, -1]).any():
        if ballot is not Ballot.FILES:
            raise MismatchError(f"{replica.where}: {KEPT}: a rank's vote was damaged on its way. {_AGAIN}")
        where = yield from differing(replicated, replica.device)
        raise DivergenceError(f"{replica.where}: {KEPT}: ranks hold different states; {where}. {_AGAIN}")
    hashes = "".join(
        word.to_bytes(8, "little", signed=True).hex() for word in rows[:, 6:-1].flatten().tolist()
    )
    return tuple(rows[:, 5].tolist()), hashes


def check_saves(replica: Replica, stamp: Stamp, ballot: Ballot, others: Sequence[Sequence[int]]) -> None:
    """Raise unless every rank's vote is on this save, and is this vote of it."""
    now = [replica.pipeline.step, *stamp, ballot]
    if odd := [f"rank {rank} of step {each[0]}" for rank, each in enumerate(others) if [*each] != now]:
        raise MismatchError(
            f"{replica.where}: {KEPT}: {', '.join(odd[:4])} answered. A "
            "message of an earlier save came again, or ranks are at different steps: start again from a "
            "checkpoint"
        )


def _commit(folder: Path, manifest: Manifest) -> None:
    named = {manifest.file_of(rank) for rank in range(manifest.world)}
    if missing := sorted(named - {entry.name for entry in os.scandir(folder)}):
        raise Malformed(
            f"rank 0 does not see {missing[0]} in {folder}, which another rank has written: the folder has "
            "to be one that all ranks share"
        )
    write_manifest(folder, manifest.stamp, as_text(manifest), keeps_last=bool(manifest.pair))


def _begin(rank: int, world: int, stamp: Stamp) -> str:
    return f"rank{rank:05}-of-{world:05}-{stamp}"


def _file(rank: int, world: int, stamp: Stamp, sha256: str) -> str:
    begin = _begin(rank, world, stamp) if stamp != BEFORE else f"rank{rank:05}-of-{world:05}"
    return f"{begin}-{sha256[:16]}.safetensors"


def layout_of(replica: Replica) -> str:
    units = [[(slot.name, slot.sparse) for slot in unit.slots] for unit in replica.pipeline.units]
    tensors = [(name, tuple(p.shape), str(p.dtype)) for name, p in replica.parameters.items()]
    kinds = sorted({key.partition("/")[0] for key in replica.pipeline.kept()})
    return hashlib.sha256(repr((units, tensors, kinds)).encode()).hexdigest()


# -- in -------------------------------------------------------------------------------------------------


def offer_of(replica: Replica, folder: Path, manifest: Manifest, optimizers: bool) -> state.Offer:
    """What this rank needs of that checkpoint in that folder, checked."""
    scheme = type(replica.scheme).__name__
    if manifest.scheme != scheme:
        raise Malformed(f"the checkpoint is of scheme {manifest.scheme}, this run's is {scheme}")
    if manifest.layout != layout_of(replica):
        raise Malformed(
            "the checkpoint is of another model, or of one cut into other units: load it with the same "
            "parameters, exchange and bucket cap"
        )
    if optimizers and not manifest.optimizers:
        raise Malformed("the checkpoint has no optimizers: load(folder, optimizers=False), if that is meant")
    source, states = stand_in(replica.rank, manifest.world), []

    def read(rank: int) -> RankState:
        stored = read_shard(folder, manifest, rank)
        part = state.part_of(replica, stored, rank, manifest.world)
        if part.step != manifest.step:
            raise Malformed(f"{manifest.file_of(rank)} is of step {part.step}, not {manifest.step}")
        if optimizers and rank == source:
            states.extend(state.optimizers_of(replica, stored, rank, stored.bytes))
        return part

    offer = state.gathered(replica, manifest.world, read)
    return replace(offer, optimizers=states) if optimizers else offer


def newest_offer(replica: Replica, folder: Path, optimizers: bool) -> state.Offer:
    return offer_of(replica, folder, read_manifest(folder), optimizers)


def manifest_of_pair(folder: Path, pair: str) -> Manifest:
    """Of the checkpoint that was written with the file of a framework that says so."""
    there = [read_manifest(folder, stamp) for stamp in fencing.manifests(folder)]
    for manifest in there:
        if manifest.pair == pair:
            return manifest
    steps = " and ".join(f"step {manifest.step}" for manifest in there)
    raise Malformed(
        f"{folder} holds {steps} of the training, which was not saved together with what the framework has "
        "loaded: one of the two was written and the other was not. Go on from another checkpoint"
    )


def holds(folder: Path, pair: str) -> bool:
    with contextlib.suppress(Malformed):
        return bool(manifest_of_pair(folder, pair))
    return False


def is_without_pairs(folder: Path) -> bool:
    """Whether a checkpoint there was written by `save()`, or by a release before there were pairs."""
    with contextlib.suppress(Malformed):
        return not read_manifest(folder).pair
    return True


def read_manifest(folder: Path, stamp: Stamp | None = None) -> Manifest:
    """The newest one, or that of one checkpoint."""
    stamp = stamp or fencing.manifests(folder)[0]
    path = folder / stamp.manifest
    content = read_bytes(path, _MANIFEST_MOST)
    version = re.search(rb'"version": (\d{1,9}),', content[:256])
    if version is not None and int(version[1]) not in (1, VERSION):
        raise Malformed(
            f"{path} is of version {int(version[1])}; this gradsieve reads versions 1 and {VERSION}"
        )
    pattern, current = (_READ_1, b"1") if version is not None and version[1] == b"1" else (_READ, b"2")
    found = pattern.fullmatch(content)
    if found is None or found[1] != current:
        raise Malformed(f"{path} is not a manifest of a gradsieve checkpoint")
    if current == b"1":
        _, world, step, scheme, layout, optimizers, hashes = found.groups()
        stamped, pair, sizes = BEFORE, b"", None
    else:
        _, term, number, world, step, scheme, layout, optimizers, pair, sizes, hashes = found.groups()
        stamped = Stamp(int(term), int(number))
    ranks = state.checked_world(int(world))
    lengths = () if sizes is None else tuple(map(int, sizes.split(b", ")))
    if len(hashes) != 2 * _HASH * ranks or len(lengths) not in (0, ranks) or int(optimizers) > 1:
        raise Malformed(f"{path} does not name a file for each of {ranks} ranks")
    if stamped != stamp:
        raise Malformed(f"{path} is the manifest {stamped} under another name")
    return Manifest(
        *(ranks, int(step), scheme.decode(), layout.decode(), optimizers == b"1", hashes.decode()),
        *(lengths, stamp, pair.decode()),
    )


def read_shard(folder: Path, manifest: Manifest, rank: int) -> TensorFile:
    path = folder / manifest.file_of(rank)
    content = read_bytes(path, size=manifest.sizes[rank] if manifest.sizes else None)
    if hashlib.sha256(content).hexdigest() != manifest.hash_of(rank):
        raise Malformed(f"{path} is not what was saved: its SHA-256 is another than the manifest's")
    try:
        return TensorFile(content)
    except Malformed as error:
        raise Malformed(f"{path}: {error}") from error


def read_bytes(path: Path, most: int | None = None, size: int | None = None) -> bytearray:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "rb", buffering=0) as stream:
            about = os.fstat(descriptor)
            if not stat.S_ISREG(about.st_mode) or (most is not None and about.st_size > most):
                raise Malformed(f"{path} is not a file of a checkpoint")
            if size is not None and about.st_size != size:
                raise Malformed(
                    f"{path} is not what was saved: it has {about.st_size} bytes, the manifest says {size}"
                )
            content, done = bytearray(about.st_size), 0
            while done < len(content):
                got = stream.readinto(memoryview(content)[done:])
                if not got:
                    raise Malformed(f"{path} ended while it was read")
                done += got
            return content
    except OSError as error:
        raise Malformed(f"{path} cannot be read: {error.strerror}") from error
