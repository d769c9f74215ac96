"""Ranks run on the loopback, or each on a host of a lab; what a fault did there is undone."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gradsieve_tools.emulation import tools
from gradsieve_tools.emulation.lab import Lab
from gradsieve_tools.emulation.stores import store_at
from gradsieve_tools.errors import LabError

FULL = "ballast"  # file that fills the disk
_CPU_GROUPS = Path("/sys/fs/cgroup/cpu")
_CLONE_NEWNET = 0x40000000
_STORE = "198.18.0.254"
_DISK = "4m"
AWAY_SECONDS = 2.0  # between the end of a store and the next at its port


class Ground:
    """The loopback."""

    store_pid = 0  # 0: the store is in this process

    def __init__(self, host: str = "127.0.0.1", interface: str = "lo") -> None:
        self.interface = interface
        self.store = store_at(host)
        self.store_port, self.host = self.store.port, host

    def namespace(self, rank: int) -> str | None:
        return None

    def fix(self) -> None:
        """Links as they were."""


class Mortal(Ground):
    """The loopback, with a store in a process of its own; when that is killed, another one follows."""

    def __init__(self) -> None:
        self.interface, self.host, self.store_port = "lo", "127.0.0.1", 0
        self._context = multiprocessing.get_context("forkserver")
        self._is_closed, self._is_there = False, threading.Event()
        self._start()
        self._keeper = threading.Thread(target=self._keep, daemon=True)
        self._keeper.start()

    def _start(self) -> None:
        self._pipe, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(self.host, self.store_port, theirs))
        process.start()
        self._process = process  # not before: another thread may be waiting for it
        theirs.close()
        self.store_port, self.store_pid = self._pipe.recv(), self._process.pid or 0
        self._is_there.set()

    def _keep(self) -> None:
        while True:
            self._process.join()
            self._is_there.clear()
            self._pipe.close()
            if self._is_closed:
                return
            time.sleep(AWAY_SECONDS)
            self._start()

    def fix(self) -> None:
        """The store is there again."""
        self._process.join(0.1)  # one that was killed a moment ago may still be taken for alive
        self._is_there.wait()

    def close(self) -> None:
        self.fix()
        self._is_closed = True
        self._process.kill()
        self._keeper.join()


def _serve(host: str, port: int, pipe: Any) -> None:
    store = store_at(host, port)
    pipe.send(store.port)
    with contextlib.suppress(EOFError):  # the process that started it has ended
        pipe.recv()


class Hosts(Ground):
    """Ranks on hosts of a lab; the store is at its switch."""

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

    def fix(self) -> None:
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
def mortal() -> Iterator[Mortal]:
    ground = Mortal()
    try:
        yield ground
    finally:
        ground.close()


@contextlib.contextmanager
def hosts(world: int) -> Iterator[Ground]:
    with Lab(world) as lab:
        yield Hosts(lab, world)


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[None]:
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
    return _CPU_GROUPS / f"{folder.parent.name}-{folder.name}"


def give_back(folder: Path) -> None:
    """A full disk's space, and a slow rank's cgroup."""
    (folder / FULL).unlink(missing_ok=True)
    with contextlib.suppress(FileNotFoundError):
        cpu_group(folder).rmdir()


def has_cpu_quota() -> bool:
    return os.geteuid() == 0 and (_CPU_GROUPS / "cpu.cfs_quota_us").exists()
