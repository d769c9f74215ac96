"""Network namespaces: making, entering, emptying, removing, and sweeping up after labs that died."""

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from gradsieve_tools.emulation import names, quotas, tools

_NAMES = Path("/var/run/netns")
# `ip netns exec NAME` lays the files of this folder's NAME over /etc.
_FILES = Path("/etc/netns")
_EMPTYING_SECONDS = 5.0


def create(hosts_files: Mapping[str, str]) -> None:
    """Make one namespace per entry: its name, and the /etc/hosts that processes entering it will see."""
    tools.ip(f"netns add {name}" for name in hosts_files)
    for name, text in hosts_files.items():
        folder = _FILES / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "hosts").write_text(text)


def entering(name: str, argv: Sequence[str]) -> list[str]:
    """The command that runs `argv` inside namespace `name`, and is killed when the lab's process dies.

    Every program in this chain replaces itself by the next, so the process started is the command itself.
    """
    guard = [tools.path_of("setpriv"), "--pdeathsig", "KILL"]
    return [*guard, tools.path_of("ip"), "netns", "exec", names.checked(name), *argv]


def remove(doomed: Collection[str]) -> None:
    """Kill every process inside these namespaces and remove them; those that do not exist are passed over."""
    _empty(doomed)
    for name in doomed:
        shutil.rmtree(_FILES / name, ignore_errors=True)
    quotas.remove(doomed)
    tools.ip(f"netns delete {name}" for name in doomed if (_NAMES / name).exists())


def sweep() -> None:
    """Remove what labs left behind whose process died too suddenly to clean up."""
    remove([name for name in _existing() if _is_orphan(name)])


def processes_in(wanted: Collection[str]) -> list[int]:
    """Ids of the processes inside these namespaces."""
    identities = {identity for name in wanted if (identity := _identity(_NAMES / name))}
    everyone = Path("/proc").glob("[0-9]*")
    return [int(process.name) for process in everyone if _identity(process / "ns/net") in identities]


def _existing() -> set[str]:
    files = {path.name for folder in (_NAMES, _FILES) if folder.is_dir() for path in folder.iterdir()}
    return files | quotas.existing()


def _is_orphan(name: str) -> bool:
    owner = names.owner_of(name)
    # This process sweeps before it builds, so its own number on a namespace means the number was reused.
    return owner is not None and (owner == os.getpid() or not _is_alive(owner))


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except OSError:
        return False
    return state not in (b"Z", b"X")  # dead, but not yet reaped


def _empty(doomed: Collection[str]) -> None:
    # Repeated, for a process may fork between being listed and being killed; bounded, for one that is stuck
    # in the kernel cannot be killed at all and must not keep the namespaces from being removed.
    deadline = time.monotonic() + _EMPTYING_SECONDS
    while (found := processes_in(doomed)) and time.monotonic() < deadline:
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
