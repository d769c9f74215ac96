"""Every rank's state, in a sidecar to a framework's own checkpoint, which holds one rank's.

What a framework saves is the shared model and rank 0's optimizer. A folder of ours next to it, or within it,
has the rest (`checkpoint/files.py`): each rank's residual and optimizer. It is written and read on all
ranks, when the framework saves and loads.

Two things that are written one after the other are a pair, and a kill may come in between. So both carry the
same identity. Ours is written first and keeps the one before; when the framework's file is written, that is
removed (`finish`). Whatever the file then says, the folder has what belongs to it.
"""

from __future__ import annotations

import logging
import secrets
from pathlib import Path

import torch

from gradsieve.checkpoint import fencing, files, state
from gradsieve.comm.ops import AllGather
from gradsieve.errors import ConfigError, MismatchError, list_ranks
from gradsieve.replica.replica import Replica
from gradsieve.sync.gradient_sync import GradientSync
from gradsieve.types import Program

_log = logging.getLogger("gradsieve")

FOLDER = "gradsieve"


def save_into(sync: GradientSync | None, folder: str | Path, pair: str) -> bool:
    """On all ranks; rank 0's `pair`, in hexadecimal digits, is what its file has to say as well. False where
    nothing of a sync is left to be saved: it was flushed and closed."""
    if sync is None or sync.is_closed:
        return False
    if "://" in str(folder):
        raise ConfigError(
            f"{sync.replica.where}: {folder} is not on a file system that is mounted here, and every rank "
            "writes its own file: save to a folder that all ranks see, and copy it from there"
        )
    sync.save_pair(folder, True, pair)
    return True


def finish(sync: GradientSync, folder: str | Path) -> None:
    """The framework's file is written; on rank 0."""
    if sync.engine.rank == 0:
        fencing.remove_older(Path(folder), fencing.manifests(Path(folder))[0])


def new_pair() -> str:
    return secrets.token_hex(16)


def load_from(sync: GradientSync, folder: str | Path, promised: bool, pair: str = "") -> None:
    """On all ranks, after model and optimizers were loaded by the framework: what was saved with its file, by
    what that says. Without a folder: where one was promised, its loss is an error; else the checkpoint is of
    plain DDP, or of a training that had ended."""
    folder = Path(folder)
    is_there = (folder / fencing.MANIFEST).exists() or bool(fencing.manifests(folder))
    if is_seen_by_all(sync, folder, is_there) or promised:
        sync.quiesce("load()")
        state.load(sync.replica, lambda: _offer(sync.replica, folder, pair))
    elif sync.engine.rank == 0:
        _log.warning(
            "%s is not there: the checkpoint is of a training without gradsieve, or of one that had ended. "
            "Going on from its model with nothing waiting, and with one optimizer's state on all ranks",
            folder,
        )


def _offer(replica: Replica, folder: Path, pair: str) -> state.LoadCandidate:
    manifest = files.manifest_of_pair(folder, pair) if pair else files.read_manifest(folder)
    return files.offer_of(replica, folder, manifest, True)


def is_seen_by_all(sync: GradientSync, folder: str | Path, is_there: bool) -> bool:
    """False where no rank sees it. Ranks that differ raise: they would go different ways."""
    sync.quiesce("load()")
    seen = sync.engine.run(_who_sees(sync, is_there), "who sees a checkpoint", sync.replica.device)
    blind = [rank for rank, sees in enumerate(seen) if not sees]
    if 0 < len(blind) < len(seen):
        raise MismatchError(
            f"{sync.replica.where}: {list_ranks(blind)} of {len(seen)} do not see {folder}: the checkpoint "
            "has to be in a folder that all ranks share"
        )
    return not blind


def _who_sees(sync: GradientSync, is_there: bool) -> Program[list[int]]:
    rows = yield AllGather(torch.tensor([int(is_there)], dtype=torch.int64, device=sync.replica.device))
    return [int(row[0]) for row in rows]
