"""Every rank's state, in a sidecar folder to a framework's own checkpoint, which holds one rank's.

A framework saves the shared model and rank 0's optimizer. The folder next to its checkpoint, or within it,
has each rank's residual and optimizer (`checkpoint/files.py`). All ranks write and read it when the framework
saves and loads.

A kill may come between the folder and the framework's file, so both carry the identity of the pair. The
folder is written first and keeps the checkpoint before, which is removed when the framework's file is written
(`finish`). Therefore the folder always has the checkpoint that belongs to the framework's file.
"""

from __future__ import annotations

import logging
import secrets
from pathlib import Path

from gradsieve.checkpoint import fencing, files, state
from gradsieve.errors import ConfigError, MismatchError, list_ranks
from gradsieve.sync import GradientSync

_log = logging.getLogger("gradsieve")

FOLDER = "gradsieve"


def save_into(sync: GradientSync | None, folder: str | Path, pair: str) -> bool:
    """Save on all ranks; the framework's file carries rank 0's `pair`, in hexadecimal digits, as well. Return
    False if the sync was flushed and closed: nothing is left to be saved."""
    if sync is None or sync.is_closed:
        return False
    if "://" in str(folder):
        raise ConfigError(
            f"{sync.replica.where}: {folder} is not on a file system that is mounted here, and every rank "
            "writes its own file: save to a folder that all ranks see, and copy it from there"
        )
    sync.prepare("save()")
    files.save(sync.replica, Path(folder), True, pair)
    return True


def finish(sync: GradientSync, folder: str | Path) -> None:
    """Remove the checkpoint before, on rank 0, because the framework's file is written."""
    if sync.engine.rank == 0:
        fencing.remove_older(Path(folder), fencing.manifests(Path(folder))[0])


def new_pair() -> str:
    return secrets.token_hex(16)


def load_from(sync: GradientSync, folder: str | Path, promised: bool, pair: str = "") -> None:
    """Load what was saved with the framework's file, on all ranks, after the framework has loaded model and
    optimizers. If there is no folder and the file promises none, the checkpoint is of plain DDP, or of a
    training that had ended: log it and load nothing."""
    folder = Path(folder)
    is_there = (folder / fencing.MANIFEST).exists() or bool(fencing.manifests(folder))
    sync.prepare("load()")
    rows = state.vote(sync.replica, "nothing was loaded", "who sees a checkpoint", [is_there], None)
    blind = [rank for rank, (sees,) in enumerate(rows[0].tolist()) if not sees]
    if 0 < len(blind) < sync.engine.world:
        raise MismatchError(
            f"{sync.replica.where}: {list_ranks(blind)} of {sync.engine.world} do not see {folder}: the "
            "checkpoint has to be in a folder that all ranks share"
        )
    if promised or not blind:
        state.load(sync.replica, lambda: files.candidate_of(sync.replica, folder, True, pair))
    elif sync.engine.rank == 0:
        _log.warning(
            "%s is not there: the checkpoint is of a training without gradsieve, or of one that had ended. "
            "Going on from its model with empty residuals, and with one optimizer's state on all ranks",
            folder,
        )
