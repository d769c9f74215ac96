"""The programs the lab drives, and whether it can run on this machine at all."""

import platform
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

from gradsieve_tools.errors import LabError

_PACKAGE = {"ip": "iproute2", "tc": "iproute2", "setpriv": "util-linux"}
_CAPABILITY = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}
# An ordinary user's PATH often lacks the folders where `ip` and `tc` live.
_FOLDERS = "/usr/sbin:/usr/bin:/sbin:/bin"


def available() -> str | None:
    """Return None if the lab can run here; otherwise what is missing and how to get it."""
    if platform.system() != "Linux":
        return f"the lab is made of Linux network namespaces, and this is {platform.system()}"
    for name, package in _PACKAGE.items():
        if shutil.which(name, path=_FOLDERS) is None:
            return f"the program `{name}` is missing; install it, e.g. `apt install {package}`"
    missing = [name for name, bit in _CAPABILITY.items() if not _effective_capabilities() >> bit & 1]
    if missing:
        return f"this process lacks {' and '.join(missing)}; run it as root (sudo, or a privileged container)"
    return None


def path_of(name: str) -> str:
    found = shutil.which(name, path=_FOLDERS)
    if found is None:
        raise LabError(f"the program `{name}` is missing; install it, e.g. `apt install {_PACKAGE[name]}`")
    return found


def ip(lines: Iterable[str], *, namespace: str | None = None) -> None:
    """Run a batch of `ip` commands, all inside `namespace` if one is given."""
    _batch("ip", lines, namespace)


def tc(lines: Iterable[str], *, namespace: str) -> None:
    """Run a batch of `tc` commands inside `namespace`."""
    _batch("tc", lines, namespace)


def _batch(tool: str, lines: Iterable[str], namespace: str | None) -> None:
    text = "".join(f"{line}\n" for line in lines)
    if not text:
        return
    where = [] if namespace is None else ["-netns", namespace]
    # -force goes on after an error: one namespace that resists removal must not save the others.
    done = run([path_of(tool), *where, "-force", "-batch", "-"], text)
    if done.returncode != 0:
        cause = done.stderr.partition("\n")[0]
        raise LabError(f"`{tool}` failed{f' in {namespace}' if namespace else ''}: {cause}")


def run(argv: Sequence[str], text: str = "") -> subprocess.CompletedProcess[str]:
    # A session of its own: Ctrl-C in a terminal must reach the lab, not an `ip` that is cleaning up.
    return subprocess.run(
        argv, input=text, capture_output=True, text=True, check=False, start_new_session=True
    )


def _effective_capabilities() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return int(line.split()[1], 16)
    return 0
