"""Where ranks run: on the loopback, or each on a host of a lab; and what a fault did there, undone."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from torch.distributed import TCPStore

from gradsieve.errors import LabError
from gradsieve.lab import tools
from gradsieve.lab.lab import Lab

FULL = "ballast"
"""The file that fills a disk."""
_CPU_GROUPS = Path("/sys/fs/cgroup/cpu")
_CLONE_NEWNET = 0x40000000
_STORE = "198.18.0.254"
_DISK = "4m"


class Ground:
    """The loopback."""

    def __init__(self, host: str = "127.0.0.1", interface: str = "lo") -> None:
        self.interface = interface
        self.store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        self.host = host

    def namespace(self, rank: int) -> str | None:
        """To enter, by its path."""
        return None

    def mend(self) -> None:
        """Links as they were."""


class Hosts(Ground):
    """A lab's; the store is at its switch, as a rendezvous of its own would be."""

    def __init__(self, lab: Lab, world: int) -> None:
        self._lab, self._world = lab, world
        self._switch = lab.netns(0).rpartition("-")[0] + "-sw"
        tools.ip(["link set lo up", f"address add {_STORE}/24 dev switch0"], namespace=self._switch)
        thread = threading.Thread(target=self._make_store)  # a thread has a namespace of its own
        thread.start()
        thread.join()

    def _make_store(self) -> None:
        enter(f"/var/run/netns/{self._switch}")
        super().__init__(_STORE, "eth0")

    def namespace(self, rank: int) -> str | None:
        return f"/var/run/netns/{self._lab.netns(rank)}"

    def mend(self) -> None:
        for rank in range(self._world):
            name = self._lab.netns(rank)
            tools.ip(["link set eth0 up"], namespace=name)
            tools.run([tools.path_of("ip"), "-netns", name, "route", "flush", "type", "blackhole"])
            tools.run([tools.path_of("tc"), "-netns", name, "qdisc", "del", "dev", "eth0", "root"])


def enter(path: str) -> None:
    """Put this thread into a network namespace; threads that it starts are there too."""
    with open(path) as place:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(place.fileno(), _CLONE_NEWNET):
            raise LabError(f"cannot enter the namespace {path}: {os.strerror(ctypes.get_errno())}")


@contextlib.contextmanager
def hosts(world: int) -> Iterator[Ground]:
    with Lab(world) as lab:
        yield Hosts(lab, world)


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """Of a few MB, at that folder."""
    _mount(["mount", "-t", "tmpfs", "-o", f"size={_DISK}", "gradsieve-chaos", str(folder)])
    try:
        yield
    finally:
        _mount(["umount", str(folder)])


def _mount(argv: list[str]) -> None:
    done = tools.run(argv)
    if done.returncode:
        raise LabError(f"`{' '.join(argv)}` failed: {done.stderr.strip()}")


def cpu_group(folder: Path) -> Path:
    """Of the training that has its checkpoints in this folder, of which there is one on a machine."""
    return _CPU_GROUPS / f"{folder.parent.name}-{folder.name}"


def give_back(folder: Path) -> None:
    """A full disk's room, and a slow rank's cgroup."""
    (folder / FULL).unlink(missing_ok=True)
    with contextlib.suppress(FileNotFoundError):
        cpu_group(folder).rmdir()


def has_cpu_quota() -> bool:
    return os.geteuid() == 0 and (_CPU_GROUPS / "cpu.cfs_quota_us").exists()
