"""Many messages in several processes, under watch: one that crashes, hangs or wants too much is a finding."""

from __future__ import annotations

import json
import os
import selectors
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from gradsieve.errors import GradsieveError

HANGS = 20.0  # seconds at one message after which it hangs; a message takes milliseconds
_STARTS = 300.0  # seconds until the first message, kernels being compiled, or to end


@dataclass(frozen=True)
class Finding:
    case: int
    what: str


@dataclass
class Report:
    # messages by family and outcome: read, refused, found
    seen: dict[str, dict[str, int]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    seconds: float = 0.0
    interrupted: bool = False

    @property
    def frames(self) -> int:
        return sum(sum(kinds.values()) for kinds in self.seen.values())

    def add(self, seen: dict[str, dict[str, int]]) -> int:
        before = self.frames
        for family, kinds in seen.items():
            own = self.seen.setdefault(family, {"read": 0, "refused": 0, "found": 0})
            for kind, number in kinds.items():
                own[kind] += number
        return self.frames - before


class Worker:
    def __init__(self, command: Sequence[str], first: int, stop: int, folder: Path) -> None:
        self.stop = stop
        self._place = folder / f"place-{first}"
        self._place.write_bytes(struct.pack("<q", -1))
        self._errors = (folder / f"errors-{first}").open("w+b")
        self.process = subprocess.Popen(
            [*command, str(first), str(stop), str(self._place)],
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, "TMPDIR": str(folder)},  # what a process that is killed leaves goes with it
        )
        assert self.process.stdout is not None
        self.lines = self.process.stdout
        self._at, self._since = -1, time.monotonic()
        self.hung = False

    def at(self) -> int:
        """The message that is being read; -1 before the first."""
        return int(struct.unpack("<q", self._place.read_bytes())[0])

    def hangs(self, seconds: float) -> bool:
        now = self.at()
        if now != self._at:
            self._at, self._since = now, time.monotonic()
        return time.monotonic() - self._since > (seconds if 0 <= now < self.stop else _STARTS)

    def last_words(self) -> str:
        self._errors.seek(0)
        return self._errors.read()[-2000:].decode(errors="replace").strip()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.lines.close()
        self._errors.close()


class Fuzz:
    """`command` starts a process that takes what `worker.py` takes after the seed."""

    def __init__(
        self, command: Sequence[str], advance: Callable[[float, str], None], hangs: float = HANGS
    ) -> None:
        self._command, self._advance, self._hangs = command, advance, hangs
        self.report = Report()
        self._watch = selectors.DefaultSelector()

    def run(self, count: int, processes: int) -> Report:
        start = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="gradsieve-fuzz-") as folder:
            edges = [count * place // processes for place in range(processes + 1)]
            try:
                for first, stop in pairwise(edges):
                    self._start(first, stop, Path(folder))
                while self._watch.get_map():
                    self._look(Path(folder))
            except KeyboardInterrupt:
                self.report.interrupted = True  # what was seen until then is a result too
            finally:
                for key in list(self._watch.get_map().values()):
                    key.data.end()
        self.report.seconds = time.monotonic() - start
        return self.report

    def _start(self, first: int, stop: int, folder: Path) -> None:
        if first < stop:
            worker = Worker(self._command, first, stop, folder)
            self._watch.register(worker.lines, selectors.EVENT_READ, worker)

    def _look(self, folder: Path) -> None:
        for key, _ in self._watch.select(timeout=1.0):
            line = key.data.lines.readline()
            if line:
                self._hear(json.loads(line))
            else:
                self._ended(key.data, folder)
        for key in list(self._watch.get_map().values()):
            if key.data.hangs(self._hangs):
                key.data.process.send_signal(signal.SIGKILL)
                key.data.hung = True

    def _hear(self, said: dict[str, object]) -> None:
        if "case" in said:
            self.report.findings.append(Finding(int(str(said["case"])), str(said["finding"])))
            return
        done = self.report.add(said["seen"])  # type: ignore[arg-type]  # as `worker.py` writes it
        self._advance(done, f"{self.report.frames:,} messages, {len(self.report.findings)} findings")

    def _ended(self, worker: Worker, folder: Path) -> None:
        """The last line was read: it is done, or died at a message and another one goes on after it."""
        self._watch.unregister(worker.lines)
        code, at, words = worker.process.wait(), worker.at(), worker.last_words()
        worker.end()
        if code == 0:
            return
        if at < 0:
            raise GradsieveError(
                f"a process of the fuzzer ended with {code} before its first message: {words}"
            )
        how = f"hung for {self._hangs:.0f} s" if worker.hung else f"died of {_name(code)}"
        self.report.findings.append(Finding(at, f"the process {how}: {words[-300:]}"))
        self._start(at + 1, worker.stop, folder)


def _name(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def fuzz(target: str, count: int, seed: int, advance: Callable[[float, str], None]) -> Report:
    processes = max(1, min(len(os.sched_getaffinity(0)), count // 10_000))
    command = [sys.executable, "-m", "gradsieve_tools.fuzz.worker", target, str(seed)]
    return Fuzz(command, advance).run(count, processes)
