"""A checkpoint in a folder that all ranks see: one file of tensors a rank, and a manifest that lists them.

    manifest-1.4.json                            ranks, shards, step, scheme, model; files' sizes and SHA-256
    rank00003-shard00000-1.4-<hash>.safetensors  the state of rank 3 (`tensors.py`)

With FSDP inside hosts a rank is a host, and each of its shards has a file; without, there is one shard.

A file is written under a temporary name, forced to disk and renamed; its name has the checkpoint's token
(`fencing.py`) and its hash, so it replaces no other file. When all ranks have written their files and hold
the same shared model, rank 0 writes the manifest in the same way. Until the manifest is renamed the
checkpoint before is whole, whatever breaks; afterwards the new one is, and the old one's files are removed.

A manifest has no paths: a file's name follows from rank, shard, token and hash. Only plain files are opened,
no links, and a file is read only if its size is the manifest's.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from functools import partial
from pathlib import Path

from torch import Tensor

from gradsieve import ranks_alike
from gradsieve.checkpoint import fencing, state
from gradsieve.checkpoint.fencing import MANIFEST, FencingToken
from gradsieve.checkpoint.rank_state import RankState, residual_in, source_rank
from gradsieve.checkpoint.state import LoadCandidate
from gradsieve.checkpoint.tensors import pieces, tensors_in
from gradsieve.errors import DivergenceError, Malformed, MismatchError, ProtocolError
from gradsieve.ranks_alike import differing, digest
from gradsieve.replica import Replica

VERSION = 3
_LONGEST = 1 << 27  # bytes of a manifest
# A manifest is read by patterns: parsing JSON takes many times its length in memory.
_HEAD = re.compile(
    rb'\{\n "format": "gradsieve checkpoint",\n "version": \d{1,9},\n "term": (\d{1,15}),\n'
    rb' "number": (\d{1,15}),\n "shards": (\d{1,15}),\n "world": (\d{1,15}),\n'
    rb' "step": (\d{1,15}),\n "scheme": "(\w{1,64})",\n "model": "([0-9a-f]{64})",\n'
    rb' "optimizers": (true|false),\n "pair": "([0-9a-f]{0,64})",\n "files": \[\n'
)
_FILE = re.compile(rb'  "(\d{1,15} [0-9a-f]{64})",?\n')

KEPT = "nothing was saved; the checkpoint before is as it was"


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
    pair: str  # identity in the framework's file that belongs to it: `frameworks/sidecar.py`
    files: tuple[str, ...]  # bytes and SHA-256 of every rank's file, shard after shard

    @property
    def token(self) -> FencingToken:
        return FencingToken(self.term, self.number)

    def expected(self, rank: int, shard: int = 0) -> tuple[int, str]:
        """Return the size in bytes and the SHA-256 of a file."""
        size, sha256 = self.files[shard * self.world + rank].split()
        return int(size), sha256

    def file_of(self, rank: int, shard: int = 0) -> str:
        return _file(rank, shard, self.token, self.expected(rank, shard)[1])


def as_text(manifest: Manifest) -> str:
    about = {"format": "gradsieve checkpoint", "version": VERSION}
    return json.dumps(about | asdict(manifest), indent=1) + "\n"


def _begin(rank: int, shard: int, token: FencingToken) -> str:
    return f"rank{rank:05}-shard{shard:05}-{token}"


def _file(rank: int, shard: int, token: FencingToken, sha256: str) -> str:
    return f"{_begin(rank, shard, token)}-{sha256[:16]}.safetensors"


# -- out ------------------------------------------------------------------------------------------------


class VotePhase(IntEnum):
    """Tell the two votes of a save apart: `lab chaos` replayed a message of the first in the second."""

    FILES = 1
    MANIFEST = 2


def save(replica: Replica, folder: Path, optimizers: bool, pair: str = "") -> None:
    """Save on all ranks and shards or, as far as a load can see, on none. With a `pair` the checkpoint before
    stays until `fencing.remove_older`, or the next save. No exchange is pending."""
    token = agreed_token(replica, folder)
    replicated = ranks_alike.replicated(replica)
    written, problem = state.attempt(lambda: _write_shard(replica, folder, token, optimizers))
    size, sha256 = written or (0, bytes(32))
    try:
        about = [size, *sha256, int(digest(list(replicated.values())))]
        rows = _vote(replica, token, VotePhase.FILES, about, problem)
        _refuse_different(replica, rows[:, :, -1], replicated)
        if replica.rank == replica.shard == 0:
            _, problem = state.attempt(lambda: _commit(replica, folder, token, rows, optimizers, pair))
        _vote(replica, token, VotePhase.MANIFEST, [], problem)
    except (Malformed, ProtocolError):
        if not (folder / token.manifest).exists():  # with one, the file belongs to a whole checkpoint
            with contextlib.suppress(OSError):  # it would fill the disk
                (folder / _file(replica.rank, replica.shard, token, sha256.hex())).unlink()
        raise


def agreed_token(replica: Replica, folder: Path) -> FencingToken:
    """Return the token that the first shard of rank 0 has found free in the folder."""

    def claimed() -> FencingToken:
        folder.mkdir(parents=True, exist_ok=True)
        return fencing.next_token(replica.tokens, folder)

    is_first = replica.rank == replica.shard == 0
    mine, problem = state.attempt(claimed) if is_first else (None, None)
    token = mine or FencingToken(0, 0)
    rows = state.vote(replica, KEPT, "the fencing token of a checkpoint", token, problem)
    # A damaged token shows in the next vote, in which this rank has its own.
    return token if is_first else FencingToken(*rows[0, 0].tolist())


def _vote(
    replica: Replica, token: FencingToken, phase: VotePhase, about: list[int], problem: Exception | None
) -> Tensor:
    """Return what all ranks of all shards say about their files.

    A message has its step, token and phase: a replayed one of an earlier save or vote names a file which may
    still be there.
    """
    now = [replica.pipeline.step, *token, phase]
    rows = state.vote(replica, KEPT, f"saving, {phase.name.lower()},", [*now, *about], problem)
    check_saves(replica, now, rows[:, :, : len(now)].flatten(0, 1).tolist())
    return rows[:, :, len(now) :]


def check_saves(replica: Replica, now: list[int], others: Sequence[list[int]]) -> None:
    """Raise unless the votes of all ranks are on this save, and in this phase of it."""
    if odd := [
        f"rank {number % replica.world} of step {found[0]}"
        for number, found in enumerate(others)
        if found != now
    ]:
        raise MismatchError(
            f"{replica.where}: {KEPT}: {', '.join(odd[:4])} answered. A "
            "message of an earlier save came again, or ranks are at different steps: start again from a "
            "checkpoint"
        )


def _refuse_different(replica: Replica, digests: Tensor, replicated: Mapping[str, Tensor]) -> None:
    """Raise if ranks hold different replicated states: a checkpoint of these could not be loaded."""
    if (digests != digests[:, :1]).any():
        what = "the comparison of what is saved"
        where = replica.engine.run(differing(replicated, replica.device), what, replica.device)
        raise DivergenceError(
            f"{replica.where}: {KEPT}: ranks hold different states; {where or 'those of another shard'}. "
            "Restart all ranks from that checkpoint"
        )


def _write_shard(replica: Replica, folder: Path, token: FencingToken, optimizers: bool) -> tuple[int, bytes]:
    tensors = state.shard_of(replica, optimizers)
    texts = (part.numel() for key, part in tensors.items() if key.endswith("/text") and "/optimizer/" in key)
    longest = max(texts, default=0)
    least = state.TEXT_SHARE * longest if longest > state.TEXT_ALWAYS else 0
    place = replica.rank, replica.shard, token
    return write(
        folder, f"{_begin(*place)}.part", pieces(tensors, least), lambda sha256: _file(*place, sha256)
    )


def write(
    folder: Path, part: str, content: Iterable[memoryview], name: Callable[[str], str]
) -> tuple[int, bytes]:
    """Write to the disk, rename by the hash, and return size and bytes of the hash. Nothing is left behind if
    this raises."""
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
    return size, found.digest()


def _commit(
    replica: Replica, folder: Path, token: FencingToken, rows: Tensor, optimizers: bool, pair: str
) -> None:
    """Write the manifest of files whose sizes and hashes are in `rows`."""
    listed = [f"{size} {bytes(sha256).hex()}" for size, *sha256, _ in rows.flatten(0, 1).tolist()]
    counts = replica.shards_of_host, replica.world, replica.pipeline.step
    scheme, model = type(replica.scheme).__name__, model_of(replica.held)
    manifest = Manifest(*token, *counts, scheme, model, optimizers, pair, tuple(listed))
    places = [(rank, shard) for shard in range(manifest.shards) for rank in range(manifest.world)]
    if missing := sorted({manifest.file_of(*place) for place in places} - {*os.listdir(folder)}):
        raise Malformed(
            f"rank 0 does not see {missing[0]} in {folder}, which another rank has written: the folder has "
            "to be one that all ranks share"
        )
    write_manifest(folder, manifest.token, as_text(manifest), keeps_last=bool(manifest.pair))


def write_manifest(folder: Path, token: FencingToken, text: str, keeps_last: bool) -> None:
    """Make the checkpoint whole, unless this run was superseded, and remove older ones. If this raises there
    is no manifest, and the files that it lists may be removed."""
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


def model_of(held: Mapping[str, Tensor]) -> str:
    whole = [(name, tuple(parameter.shape), str(parameter.dtype)) for name, parameter in held.items()]
    return hashlib.sha256(repr(whole).encode()).hexdigest()


# -- in -------------------------------------------------------------------------------------------------


def candidate_of(replica: Replica, folder: Path, optimizers: bool, pair: str = "") -> LoadCandidate:
    """Read and check what this rank needs of the newest checkpoint, or of that with `pair`; it may be of any
    numbers of ranks and shards."""
    manifest = manifest_of_pair(folder, pair) if pair else read_manifest(folder)
    refuse_other(replica, manifest, optimizers)
    source = source_rank(replica.rank, manifest.world)

    def read(rank: int) -> RankState:
        with_optimizers = optimizers and rank == source
        if manifest.shards == replica.shards_of_host:
            stored = read_shard(folder, manifest, rank, replica.shard)
            part = state.part_of(replica, stored, rank, manifest.world, with_optimizers)
        else:
            from gradsieve.checkpoint import reshard  # here: it loads torch's DTensor, which FSDP alone needs

            of_shard = partial(read_shard, folder, manifest, rank)
            counts = manifest.shards, manifest.world
            part = reshard.part_of(replica, of_shard, rank, *counts, with_optimizers)
        if part.step != manifest.step:
            raise Malformed(f"{manifest.file_of(rank)} is of step {part.step}, not {manifest.step}")
        return part

    return state.gathered(replica, manifest.world, read)


def complete_model(folder: Path, held: Mapping[str, Tensor], shard: int, shards: int) -> dict[str, Tensor]:
    """Return w - mean e of all ranks of a checkpoint, as far as it is in this shard."""
    from gradsieve.checkpoint.reshard import Cut

    manifest = read_manifest(folder)
    refuse_other_model(held, manifest)
    cut = Cut(held, shard, shards, manifest.shards)
    out: dict[str, Tensor] = {}
    for rank in range(manifest.world):
        memories = cut.empty_models()
        for old in cut.needed():
            cut.fill(memories, read_shard(folder, manifest, rank, old), rank, old)
        for name in held:
            model = out.setdefault(name, memories[f"shared/{name}"])
            model -= residual_in(memories, name) / manifest.world
    return out


def refuse_other(replica: Replica, manifest: Manifest, optimizers: bool) -> None:
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
    """Return the manifest of the checkpoint that was saved with the framework's file of that identity."""
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


def read_manifest(folder: Path, token: FencingToken | None = None) -> Manifest:
    """Return the newest manifest, or that of one checkpoint."""
    if token is None:
        token = next(iter(fencing.manifests(folder)), None)
    if token is None:
        raise Malformed(f"{folder / MANIFEST} cannot be read: No such file, or none with a number beside it")
    path = folder / token.manifest
    content = read_bytes(path, _LONGEST)
    version = re.search(rb'"version": (\d{1,9}),', content[:64])
    if version is not None and int(version[1]) != VERSION:
        raise Malformed(f"{path} is of version {int(version[1])}; this gradsieve reads version {VERSION}")
    head = _HEAD.match(content)
    if head is None:
        raise Malformed(f"{path} is not a manifest of a gradsieve checkpoint")
    *numbers, scheme, model, optimizers, pair = (text.decode() for text in head.groups())
    files = tuple(text.decode() for text in _FILE.findall(content, head.end()))
    term, number, shards, world, step = map(int, numbers)
    if not 1 <= len(files) == shards * world <= state.MOST_RANKS:
        raise Malformed(f"{path} does not name a file for each of {shards * world} ranks")
    manifest = Manifest(term, number, shards, world, step, scheme, model, optimizers == "true", pair, files)
    if as_text(manifest).encode() != content:
        raise Malformed(f"{path} is not a manifest of a gradsieve checkpoint")
    if manifest.token != token:
        raise Malformed(f"{path} is the manifest {manifest.token} under another name")
    return manifest


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
