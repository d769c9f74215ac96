"""A checkpoint in a folder that all ranks see: one file of tensors a rank, and a manifest that names them.

    manifest-1.4.json                            ranks, shards, step, scheme, model; files' sizes and SHA-256
    rank00003-shard00000-1.4-<hash>.safetensors  what rank 3 had (`tensors.py`)

With FSDP inside hosts a rank is a host, and each of its shards has a file; without, there is one shard.

A file is written under another name, forced to disk and renamed; its name has the checkpoint's token
(`fencing.py`) and its hash, so that it takes no other one's place. When all ranks have written theirs and
hold the same shared model, rank 0 writes the manifest in the same way. Until that is renamed the checkpoint
before is whole, whatever breaks; afterwards the new one is, and the old one's files are removed.

A manifest names no paths: a file's name follows from rank, shard, token and hash. Symbolic links and what is
not a plain file are not opened, and no file is read that has another size than the manifest says.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradsieve import ranks_alike
from gradsieve.checkpoint import fencing, state
from gradsieve.checkpoint.fencing import MANIFEST, FencingToken
from gradsieve.checkpoint.rank_state import RankState, stand_in
from gradsieve.checkpoint.tensors import parsed, pieces, tensors_in
from gradsieve.comm.ops import AllGather
from gradsieve.errors import DivergenceError, Malformed, MismatchError, ProtocolError
from gradsieve.ranks_alike import differing, digest
from gradsieve.replica.replica import Replica
from gradsieve.types import Program

VERSION = 3
_FORMAT = {"format": "gradsieve checkpoint", "version": VERSION}
_MANIFEST = 2048, 70, 100  # its length: besides files; for each of these, at least and at most
_MANIFEST_MOST = 1 << 27
_HASH = 32  # bytes
_NUMBER = int, r"\d{1,15}"
_FIELDS: Mapping[str, tuple[type, str]] = {
    **dict.fromkeys(("term", "number", "shards", "world", "step"), _NUMBER),
    "scheme": (str, r"\w{1,64}"),
    "model": (str, "[0-9a-f]{64}"),
    "optimizers": (bool, ".*"),
    "pair": (str, "[0-9a-f]{0,64}"),
    "files": (list, r"\[('\d{1,15} [0-9a-f]{64}'(, )?)+\]"),
}

KEPT = "nothing was saved; the checkpoint before is as it was"
_AGAIN = "Restart all ranks from that checkpoint"


@dataclass(frozen=True, slots=True)
class Manifest:
    term: int
    number: int
    shards: int
    world: int
    step: int
    scheme: str
    model: str  # a hash of names, whole shapes and types
    optimizers: bool
    pair: str  # what the framework's file, written with it, says: `frameworks/sidecar.py`
    files: tuple[str, ...]  # bytes and SHA-256 of every rank's file, shard after shard

    @property
    def token(self) -> FencingToken:
        return FencingToken(self.term, self.number)

    def expected(self, rank: int, shard: int = 0) -> tuple[int, str]:
        """Bytes and SHA-256 of a file."""
        size, sha256 = self.files[shard * self.world + rank].split()
        return int(size), sha256

    def file_of(self, rank: int, shard: int = 0) -> str:
        return _file(rank, shard, self.token, self.expected(rank, shard)[1])


def as_text(manifest: Manifest) -> str:
    return json.dumps(_FORMAT | asdict(manifest), indent=1) + "\n"


def _begin(rank: int, shard: int, token: FencingToken) -> str:
    return f"rank{rank:05}-shard{shard:05}-{token}"


def _file(rank: int, shard: int, token: FencingToken, sha256: str) -> str:
    return f"{_begin(rank, shard, token)}-{sha256[:16]}.safetensors"


# -- out ------------------------------------------------------------------------------------------------


class VotePhase(IntEnum):
    """What a vote in a save is about: `lab chaos` replayed one of a save in the next one of the same save."""

    FILES = 1
    MANIFEST = 2


@dataclass(frozen=True, slots=True)
class FileInfo:
    """What a rank has to say of its file, or why there is none."""

    size: int = 0
    sha256: bytes = bytes(_HASH)
    problem: Exception | None = None


def save(replica: Replica, folder: Path, optimizers: bool, pair: str = "") -> None:
    """On all ranks and shards or, as far as whoever loads can see, on none. With a `pair` the checkpoint
    before stays until `fencing.remove_older`, or the next save. No exchange is pending."""
    token = agreed_token(replica, folder)
    step, scheme = replica.pipeline.step, type(replica.scheme).__name__

    def voted(phase: VotePhase, mine: FileInfo, replicated: Mapping[str, Tensor]) -> list[list[int]]:
        when = f"the vote on {'files' if phase is VotePhase.FILES else 'the manifest'} of step {step}"
        vote = _vote(replica, token, phase, mine, replicated)
        rows = state.on_all_shards(replica, KEPT, lambda: replica.engine.run(vote, when, replica.device))
        listed: list[list[int]] = rows.flatten(0, 1).tolist()
        return listed

    try:
        mine = _write_shard(replica, folder, token, optimizers)
    except Exception as error:  # whatever it is, the other ranks wait for the outcome
        mine = FileInfo(problem=error)
    try:
        files = tuple(map(_listed, voted(VotePhase.FILES, mine, ranks_alike.replicated(replica))))
        if replica.rank == replica.shard == 0:
            about = token.term, token.number, replica.shards_of_host, replica.world, step, scheme
            try:
                _commit(folder, Manifest(*about, model_of(replica.held), optimizers, pair, files))
            except Exception as error:
                mine = replace(mine, problem=error)
        voted(VotePhase.MANIFEST, mine, {})
    except (Malformed, ProtocolError):
        if not (folder / token.manifest).exists():  # with one, the file belongs to a whole checkpoint
            with contextlib.suppress(OSError):  # so that it does not fill the disk
                (folder / _file(replica.rank, replica.shard, token, mine.sha256.hex())).unlink()
        raise


def agreed_token(replica: Replica, folder: Path) -> FencingToken:
    """That of rank 0's first shard, which asks the folder."""

    def claimed() -> Tensor:
        token = FencingToken(0, 0)
        if replica.shard == 0:
            folder.mkdir(parents=True, exist_ok=True)
            token = fencing.next_token(replica.tokens, folder)
        return torch.tensor(token, dtype=torch.int64, device=replica.device)

    token, problem = FencingToken(0, 0), None
    if replica.rank == 0:
        try:
            token = FencingToken(*state.on_all_shards(replica, KEPT, claimed)[0].tolist())
        except Exception as error:  # whatever it is, the other ranks wait for the outcome
            problem = error
    when = f"the token of a checkpoint after step {replica.pipeline.step}"
    agreed = replica.engine.run(_token_of_rank_0(replica, token, problem), when, replica.device)
    return token if replica.rank == 0 else agreed  # a damaged one shows in the vote, where they differ


def _token_of_rank_0(
    replica: Replica, token: FencingToken, problem: Exception | None
) -> Program[FencingToken]:
    row = torch.tensor([int(problem is None), *token], dtype=torch.int64, device=replica.device)
    good, term, number = (yield AllGather(row))[0].tolist()
    if not good:
        yield from state.refuse(replica, KEPT, [0], problem)
    return FencingToken(term, number)


def _write_shard(replica: Replica, folder: Path, token: FencingToken, optimizers: bool) -> FileInfo:
    tensors = state.shard_of(replica, optimizers)
    texts = [part.numel() for key, part in tensors.items() if key.endswith("/text") and "/optimizer/" in key]
    longest = max(texts, default=0)
    least = state.TEXT_SHARE * longest if longest > state.TEXT_ALWAYS else 0
    place = replica.rank, replica.shard, token
    content = pieces(tensors, least)
    return write(folder, f"{_begin(*place)}.part", content, lambda sha256: _file(*place, sha256))


def write(folder: Path, part: str, content: Iterable[memoryview], name: Callable[[str], str]) -> FileInfo:
    """To the disk, then under the name that it has by its hash. What breaks off leaves nothing behind."""
    path, found, size = folder / part, hashlib.sha256(), 0
    path.unlink(missing_ok=True)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
        with open(descriptor, "wb") as stream:
            for piece in content:
                stream.write(piece)
                found.update(piece)
                size += piece.nbytes
            stream.flush()
            os.fsync(stream.fileno())
        path.rename(folder / name(found.hexdigest()))
    finally:
        path.unlink(missing_ok=True)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return FileInfo(size, found.digest())


def _commit(folder: Path, manifest: Manifest) -> None:
    places = [(rank, shard) for shard in range(manifest.shards) for rank in range(manifest.world)]
    if missing := sorted({manifest.file_of(*place) for place in places} - {*os.listdir(folder)}):
        raise Malformed(
            f"rank 0 does not see {missing[0]} in {folder}, which another rank has written: the folder has "
            "to be one that all ranks share"
        )
    write_manifest(folder, manifest.token, as_text(manifest), keeps_last=bool(manifest.pair))


def write_manifest(folder: Path, token: FencingToken, text: str, keeps_last: bool) -> None:
    """The checkpoint is whole with it. One of a run that was replaced is none, and removes nothing. Where
    this raises there is no manifest, so that the files which it names may be removed."""
    content, part = [memoryview(text.encode())], f"manifest-{token}.part"
    try:
        write(folder, part, content, lambda _: token.manifest)
        fencing.refuse_superseded(folder, token)
        write(folder, part, content, lambda _: MANIFEST)
    except BaseException:
        (folder / token.manifest).unlink(missing_ok=True)
        raise
    kept = fencing.manifests(folder)[: 2 if keeps_last else 1]
    fencing.remove_older(folder, kept[-1])


def _vote(
    replica: Replica, token: FencingToken, phase: VotePhase, mine: FileInfo, replicated: Mapping[str, Tensor]
) -> Program[Tensor]:
    """All ranks' sizes and hashes, if every rank has written its file, and what is replicated in these is the
    same: one of ranks that differ could not be loaded.

    A message has its step, its token and which vote it is: one of an earlier save or vote that comes again
    names a file which may still be there.
    """
    words = [mine.sha256[at : at + 8] for at in range(0, _HASH, 8)]
    row = torch.tensor(
        [
            *(int(mine.problem is None), replica.pipeline.step, *token, phase, mine.size),
            *(int.from_bytes(word, "little", signed=True) for word in words),
            int(digest(list(replicated.values()))),
        ],
        dtype=torch.int64,
        device=replica.device,
    )
    rows = yield AllGather(row)
    check_saves(replica, token, phase, rows[:, 1:5].tolist())
    refused = (rows[:, 0] != 1).nonzero().flatten().tolist()
    if refused:
        yield from state.refuse(replica, KEPT, refused, mine.problem)
    if (rows[:, -1] != rows[0, -1]).any():
        if phase is not VotePhase.FILES:
            raise MismatchError(f"{replica.where}: {KEPT}: a rank's vote was damaged on its way. {_AGAIN}")
        where = yield from differing(replicated, replica.device)
        raise DivergenceError(f"{replica.where}: {KEPT}: ranks hold different states; {where}. {_AGAIN}")
    return rows[:, 5:-1]


def check_saves(
    replica: Replica, token: FencingToken, phase: VotePhase, others: Sequence[Sequence[int]]
) -> None:
    """Raise unless every rank's vote is on this save, and is this vote of it."""
    now = [replica.pipeline.step, *token, phase]
    if odd := [f"rank {rank} of step {found[0]}" for rank, found in enumerate(others) if [*found] != now]:
        raise MismatchError(
            f"{replica.where}: {KEPT}: {', '.join(odd[:4])} answered. A "
            "message of an earlier save came again, or ranks are at different steps: start again from a "
            "checkpoint"
        )


def _listed(row: Sequence[int]) -> str:
    return f"{row[0]} " + "".join(word.to_bytes(8, "little", signed=True).hex() for word in row[1:])


def model_of(held: Mapping[str, Tensor]) -> str:
    whole = [(name, tuple(parameter.shape), str(parameter.dtype)) for name, parameter in held.items()]
    return hashlib.sha256(repr(whole).encode()).hexdigest()


# -- in -------------------------------------------------------------------------------------------------


def newest_offer(replica: Replica, folder: Path, optimizers: bool) -> state.LoadCandidate:
    return offer_of(replica, folder, read_manifest(folder), optimizers)


def offer_of(replica: Replica, folder: Path, manifest: Manifest, optimizers: bool) -> state.LoadCandidate:
    """What this rank needs of that checkpoint, of as many shards as now, checked."""
    refuse_other(replica, manifest, optimizers)
    if manifest.shards != replica.shards_of_host:
        raise Malformed(
            f"{manifest.shards} shards saved the checkpoint, and {replica.shards_of_host} load it"
        )
    source, states = stand_in(replica.rank, manifest.world), []

    def read(rank: int) -> RankState:
        stored = read_shard(folder, manifest, rank, replica.shard)
        part = state.part_of(replica, stored, rank, manifest.world)
        if part.step != manifest.step:
            raise Malformed(f"{manifest.file_of(rank)} is of step {part.step}, not {manifest.step}")
        if optimizers and rank == source:
            size, _ = manifest.expected(rank, replica.shard)
            states.extend(state.optimizers_of(replica, stored, rank, size))
        return part

    offer = state.gathered(replica, manifest.world, read)
    return replace(offer, optimizers=states) if optimizers else offer


def refuse_other(replica: Replica, manifest: Manifest, optimizers: bool) -> None:
    """A checkpoint of another kind of run."""
    scheme = type(replica.scheme).__name__
    if manifest.scheme != scheme:
        raise Malformed(f"the checkpoint is of scheme {manifest.scheme}, this run's is {scheme}")
    refuse_other_model(replica.held, manifest)
    if optimizers and not manifest.optimizers:
        raise Malformed("the checkpoint has no optimizers: load(folder, optimizers=False), if that is meant")


def refuse_other_model(held: Mapping[str, Tensor], manifest: Manifest) -> None:
    if manifest.model != model_of(held):
        raise Malformed("the checkpoint is of another model: load it with the same parameters")


def manifest_of_pair(folder: Path, pair: str) -> Manifest:
    """Of the checkpoint that was written with the file of a framework that says so."""
    there = [read_manifest(folder, token) for token in fencing.manifests(folder)] or [read_manifest(folder)]
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
    """Whether a checkpoint there was written by `save()`."""
    with contextlib.suppress(Malformed):
        return not read_manifest(folder).pair
    return True


def read_manifest(folder: Path, token: FencingToken | None = None) -> Manifest:
    """The newest one, or that of one checkpoint."""
    if token is None:
        token = next(iter(fencing.manifests(folder)), None)
    if token is None:
        raise Malformed(f"{folder / MANIFEST} cannot be read: No such file, or none with a number beside it")
    path = folder / token.manifest
    content = read_bytes(path, _MANIFEST_MOST)
    begin, least, most = _MANIFEST
    counts = re.search(rb'"shards": (\d{1,7}),\s{0,9}"world": (\d{1,7}),', content[:begin])
    version = re.search(rb'"version": (\d{1,9}),', content[:begin])
    if version is not None and int(version[1]) != VERSION:
        raise Malformed(f"{path} is of version {int(version[1])}; this gradsieve reads version {VERSION}")
    files = int(counts[1]) * int(counts[2]) if counts else 0
    # Before anything is made of it: what is not as it should be may take many times its length.
    if not 1 <= files <= state.MOST_RANKS or not least * files < len(content) < begin + most * files:
        raise Malformed(f"{path} does not name a file for each rank of a checkpoint")
    plain = parsed(content)
    if type(plain) is not dict or any(plain.pop(key, None) != value for key, value in _FORMAT.items()):
        raise Malformed(f"{path} is not a manifest of a gradsieve checkpoint")
    if plain.keys() != _FIELDS.keys() or not all(_is(plain[key], *kind) for key, kind in _FIELDS.items()):
        raise Malformed(f"{path} is not a manifest of a gradsieve checkpoint")
    manifest = Manifest(**plain | {"files": tuple(plain["files"])})
    if len(manifest.files) != files or manifest.shards * manifest.world != files:
        raise Malformed(f"{path} does not name a file for each of {manifest.shards * manifest.world} ranks")
    if manifest.token != token:
        raise Malformed(f"{path} is the manifest {manifest.token} under another name")
    return manifest


def _is(value: Any, kind: type, pattern: str) -> bool:
    return type(value) is kind and re.fullmatch(pattern, str(value), re.ASCII) is not None


def read_shard(folder: Path, manifest: Manifest, rank: int, shard: int = 0) -> dict[str, Tensor]:
    path = folder / manifest.file_of(rank, shard)
    size, sha256 = manifest.expected(rank, shard)
    content = read_bytes(path, size, exactly=True)
    if hashlib.sha256(content).hexdigest() != sha256:
        raise Malformed(f"{path} is not what was saved: its SHA-256 is another than the manifest's")
    try:
        return tensors_in(content)
    except Malformed as error:
        raise Malformed(f"{path}: {error}") from error


def read_bytes(path: Path, most: int, exactly: bool = False) -> bytearray:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "rb", buffering=0) as stream:
            about = os.fstat(descriptor)
            if not stat.S_ISREG(about.st_mode) or (about.st_size > most and not exactly):
                raise Malformed(f"{path} is not a file of a checkpoint")
            if exactly and about.st_size != most:
                raise Malformed(
                    f"{path} is not what was saved: it has {about.st_size} bytes, the manifest says {most}"
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
