"""Every rank's state beside a framework's own checkpoint, which holds one rank's.

What a framework saves is the shared model and rank 0's optimizer. A folder of ours next to it, or within it,
has the rest (`folder.py`): what waits on each rank and each rank's optimizer. It is written and read on all
ranks, when the framework saves and loads.
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from gradsieve.comm.ops import AllGather
from gradsieve.errors import ConfigError, MismatchError, list_ranks
from gradsieve.integrations.gradient_sync import GradientSync
from gradsieve.integrations.saving import come_to_rest
from gradsieve.types import Program

_log = logging.getLogger("gradsieve")

FOLDER = "gradsieve"


def save_into(sync: GradientSync | None, folder: str | Path) -> bool:
    """On all ranks. False where nothing of a sync is left to be saved: it was flushed and closed."""
    if sync is None or sync.is_closed:
        return False
    if "://" in str(folder):
        raise ConfigError(
            f"{_where(sync)}: {folder} is not on a file system that is mounted here, and every rank writes "
            "its own file: save to a folder that all ranks see, and copy it from there"
        )
    sync.save(folder)
    return True


def load_from(sync: GradientSync, folder: str | Path, promised: bool) -> None:
    """On all ranks, after model and optimizers were loaded by the framework. Without a folder: where one was
    promised, its loss is an error; else the checkpoint is of plain DDP, or of a training that had ended."""
    is_there = (Path(folder) / "manifest.json").exists()
    if is_seen_by_all(sync, folder, is_there) or promised:
        sync.load(folder)
    elif sync.engine.rank == 0:
        _log.warning(
            "%s is not there: the checkpoint is of a training without gradsieve, or of one that had ended. "
            "Going on from its model with nothing waiting, and with one optimizer's state on all ranks",
            folder,
        )


def is_seen_by_all(sync: GradientSync, folder: str | Path, is_there: bool) -> bool:
    """False where no rank sees it. Ranks that differ raise: they would go different ways."""
    come_to_rest(sync, "load()")
    seen = sync.engine.run(_told(sync, is_there), "who sees a checkpoint", sync.device)
    blind = [rank for rank, sees in enumerate(seen) if not sees]
    if 0 < len(blind) < len(seen):
        raise MismatchError(
            f"{_where(sync)}: {list_ranks(blind)} of {len(seen)} do not see {folder}: the checkpoint has "
            "to be in a folder that all ranks share"
        )
    return not blind


def _told(sync: GradientSync, is_there: bool) -> Program[list[int]]:
    rows = yield AllGather(torch.tensor([int(is_there)], dtype=torch.int64, device=sync.device))
    return [int(row[0]) for row in rows]


def _where(sync: GradientSync) -> str:
    return f"rank {sync.engine.rank}, step {sync.pipeline.step}"
