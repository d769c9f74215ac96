"""How much of the machine's processors a host may use: a cgroup with its name, of version 2 or 1."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
from pathlib import Path

from gradsieve_tools.emulation import names
from gradsieve_tools.errors import LabError

ROOT = Path("/sys/fs/cgroup")
_PERIOD = 100_000  # microseconds


def create(cpus: Mapping[str, float]) -> None:
    """Create a group of processors for each namespace."""
    for name, share in cpus.items():
        folder = _folder()
        if folder is None:
            raise LabError(
                "`cpus` needs the cpu controller of cgroups, which is not here: take it out of the file"
            )
        group, quota = folder / names.checked(name), round(share * _PERIOD)
        try:
            group.mkdir(exist_ok=True)
            if (group / "cpu.max").exists():
                (group / "cpu.max").write_text(f"{quota} {_PERIOD}")
            else:
                (group / "cpu.cfs_period_us").write_text(str(_PERIOD))
                (group / "cpu.cfs_quota_us").write_text(str(quota))
        except OSError as error:
            raise LabError(f"cpus cannot be limited here: {error}") from error


def enter(name: str, pid: int) -> None:
    """Put a process in; what it starts from then on is there too."""
    folder = _folder()
    assert folder is not None
    with contextlib.suppress(ProcessLookupError):  # it has ended already
        (folder / name / "cgroup.procs").write_text(str(pid))


def remove(doomed: Collection[str]) -> None:
    """Groups of hosts whose processes have ended; those that do not exist are passed over."""
    folder = _folder()
    if folder is not None:
        for name in doomed:
            with contextlib.suppress(OSError):
                (folder / name).rmdir()


def existing() -> set[str]:
    """Names of groups that some lab has made."""
    folder = _folder()
    found = folder.glob("gs*-*") if folder is not None else ()
    return {path.name for path in found if names.owner_of(path.name) is not None}


def _folder() -> Path | None:
    with contextlib.suppress(OSError):
        if "cpu" in (ROOT / "cgroup.controllers").read_text().split():
            return ROOT
    return ROOT / "cpu" if (ROOT / "cpu" / "cpu.cfs_quota_us").exists() else None
