"""What a rank does to the files of a checkpoint, operation by operation, so that a fault can come in one.

It is for the process of a rank, which ends with its episode: nothing is put back.
"""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gradsieve.checkpoint import files

OPERATIONS = ("write", "fsync", "rename", "unlink", "fsync of the folder")
# Called with an operation and a file name: after half of a write, before any other operation
Within = Callable[[str, str], None]


class _Stream(io.BufferedWriter):
    def __init__(self, descriptor: int, within: Callable[[], None]) -> None:
        super().__init__(io.FileIO(descriptor, "wb"))
        self._within = within

    def write(self, piece: Any) -> int:
        half = super().write(piece[: len(piece) // 2])
        self.flush()  # a half that was still in memory would not be seen after a kill
        self._within()
        return half + super().write(piece[half:])


def tap(within: Within) -> None:
    """Call `within` for every file that is written as those of checkpoints are."""
    last = ""
    usual_fsync, usual_rename, usual_unlink = os.fsync, Path.rename, Path.unlink

    def opened(descriptor: int, mode: str, **how: Any) -> Any:
        nonlocal last
        if mode != "wb":
            return open(descriptor, mode, **how)
        last = Path(os.readlink(f"/proc/self/fd/{descriptor}")).name
        return _Stream(descriptor, lambda: within("write", last))

    def fsync(descriptor: int) -> None:
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        within("fsync of the folder" if is_folder else "fsync", last)
        usual_fsync(descriptor)

    def rename(path: Path, target: Path) -> Path:
        within("rename", last)
        return usual_rename(path, target)

    def unlink(path: Path, missing_ok: bool = False) -> None:
        within("unlink", path.name)
        usual_unlink(path, missing_ok)

    vars(files)["open"] = opened
    vars(os)["fsync"] = fsync
    Path.rename = rename  # type: ignore[method-assign, assignment]
    Path.unlink = unlink  # type: ignore[method-assign, assignment]
