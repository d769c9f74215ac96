"""A command in a process of its own, and all processes that descend from it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import gradsieve

SOURCE = str(Path(gradsieve.__file__).parents[1])


class Command:
    """`gradsieve` with these arguments; all its processes carry a mark."""

    def __init__(self, arguments: Sequence[str], on_interruption: signal.Handlers) -> None:
        name, value = "GRADSIEVE_TEST", uuid.uuid4().hex
        self.mark = f"{name}={value}".encode()
        before = signal.signal(signal.SIGINT, on_interruption)  # a child is born with what its parent ignores
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "gradsieve_tools.cli.main", *arguments],
                env={**os.environ, "PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1", name: value},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        finally:
            signal.signal(signal.SIGINT, before)

    def alive(self) -> list[int]:
        return [int(path.name) for path in Path("/proc").glob("[0-9]*") if self._is_ours(path)]

    def interrupted(self) -> tuple[int, str]:
        """Exit code and output, after SIGINT to the first of the processes alone."""
        self.process.send_signal(signal.SIGINT)
        output, _ = self.process.communicate(timeout=60)
        return self.process.returncode, output

    def _is_ours(self, process: Path) -> bool:
        try:
            return self.mark in (process / "environ").read_bytes().split(b"\0")
        except OSError:
            return False


@contextlib.contextmanager
def running(*arguments: str, on_interruption: signal.Handlers = signal.Handlers.SIG_DFL) -> Iterator[Command]:
    command = Command(arguments, on_interruption)
    try:
        yield command
    finally:
        for pid in command.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        command.process.communicate()


def wait_until(condition: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)
