"""Nodes on the loopback: each is an agent of torchrun with one worker, in real processes that can be killed.

The store by which agents find each other is in this process, so that any node may go. Each generation of
workers gets a store of its own from torchrun (`TORCH_DISABLE_SHARE_RDZV_TCP_STORE`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from typing_extensions import Self

from gradsieve_tools.emulation.stores import store_at

_MARK = "GRADSIEVE_SPOT"
# A dead agent is given up after 3 s (torchrun's own: 15 s), one that died while ranks were dealt out after 20
# s (60 s); more nodes than are needed are not waited for
_RENDEZVOUS = "is_host=0,keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=1,read_timeout=20"


class Node:
    """An agent, and what it and its workers write."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process, self._log = process, log

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def workers(self) -> list[int]:
        found: list[int] = []
        with contextlib.suppress(OSError):  # the agent has ended meanwhile
            for task in Path(f"/proc/{self.process.pid}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
        return found

    def kill_worker(self) -> bool:
        """Kill a worker, and return whether there was one."""
        workers = self.workers()
        for pid in workers:
            kill(pid)
        return bool(workers)

    def kill(self) -> None:
        """Kill a node as a power loss would, except that the kernel closes connections."""
        workers = self.workers()
        self.process.kill()
        for pid in workers:
            kill(pid)
        self.process.wait()

    def give_notice(self) -> None:
        """Send SIGTERM to the agent; torchrun hands it on to its workers, waits and ends."""
        self.process.send_signal(signal.SIGTERM)


class Nodes:
    def __init__(
        self, folder: Path, script: Sequence[str], count: str, environment: Mapping[str, str] | None = None
    ) -> None:
        """`count` is torchrun's --nnodes: a number, or least:most."""
        self._folder, self._mark = folder, uuid.uuid4().hex
        folder.mkdir(parents=True, exist_ok=True)
        self._store = store_at("127.0.0.1")
        settings = {
            "nnodes": count,
            "nproc-per-node": "1",
            "rdzv-backend": "c10d",
            "rdzv-endpoint": f"127.0.0.1:{self._store.port}",
            "rdzv-conf": _RENDEZVOUS,
            "local-addr": "127.0.0.1",
            "max-restarts": "1000",
            "monitor-interval": "0.1",
        }
        options = [word for name, value in settings.items() for word in (f"--{name}", value)]
        self._command, self._script = [sys.executable, "-m", "torch.distributed.run", *options], script
        self._environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            **(environment or {}),
            _MARK: self._mark,
        }
        self.all: list[Node] = []
        self._job = 0

    @property
    def running(self) -> list[Node]:
        return [node for node in self.all if node.is_running]

    def start(self) -> Node:
        """Start one more node."""
        log = self._folder / f"node-{len(self.all)}.log"
        command = [*self._command, "--rdzv-id", f"job-{self._job}", *self._script]
        with log.open("wb") as out:
            process = subprocess.Popen(
                command, env=self._environment, stdout=out, stderr=out, start_new_session=True
            )
        self.all.append(Node(process, log))
        return self.all[-1]

    def begin_anew(self) -> None:
        """Start all nodes again, without the agents of before."""
        for node in self.running:
            node.kill()
        self._job += 1

    def close(self) -> None:
        """End whatever is left; who was orphaned has the variable, too."""
        for node in self.running:
            node.process.kill()
            node.process.wait()
        mark = f"{_MARK}={self._mark}".encode()
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (path / "environ").read_bytes().split(b"\0"):
                    kill(int(path.name))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def wait_for(nodes: Sequence[Node], seconds: float) -> bool:
    """Return whether all of these have ended by themselves, and well, within that time."""
    deadline = time.monotonic() + seconds
    while any(node.is_running for node in nodes) and time.monotonic() < deadline:
        time.sleep(0.05)
    return all(node.process.poll() == 0 for node in nodes)
