"""A training inside torchft whose replicas are killed and stopped while it goes on: does it end as good?

One process a replica, a real `torchft_lighthouse`, real signals. Replicas are forked from a process that has
torch loaded, so that one that was killed is back within the steps that remain.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing import connection
from pathlib import Path
from typing import Any

from gradsieve import torch_names
from gradsieve.errors import ConfigError, GradsieveError
from gradsieve_tools.bench.common.ranks import ended_with_us
from gradsieve_tools.bench.elastic.replica import Plan, live

COLUMNS = ["training", "final", "seconds", "kills", "stops", "back", "failed", "lost_mass", "gone_s", "alike"]
# A replica without a heartbeat for so long is dead to torchft; others wait this long for one that lives
_HEARTBEAT_MS, _JOIN_MS, _TICK_MS = 500, 1000, 20
_SILENCE = 90.0  # seconds without any message after which replicas are taken to hang


@dataclass(frozen=True, slots=True)
class Faults:
    kill_every: int = 0  # steps between two; 0 for none
    stop_every: int = 0
    stop_seconds: float = 2.0


@dataclass(slots=True)
class Life:
    name: str
    process: Any
    pipe: connection.Connection
    log: Path
    step: int = -1
    ended: dict[str, Any] | None = None
    is_stopped: bool = False


@dataclass(slots=True)
class _Course:
    kills: int = 0
    stops: int = 0
    back: int = 0
    away: dict[int, float] = field(default_factory=dict)
    due: float | None = None  # when the next fault strikes
    # time and step of the last fault, until the others have passed it
    struck: tuple[float, int] | None = None
    # Seconds from a fault until the others are two steps further: the first may have been pending
    gone: list[float] = field(default_factory=list)


def start_lighthouse(least: int, port: int) -> subprocess.Popen[bytes]:
    program = shutil.which("torchft_lighthouse") or str(Path(sys.executable).with_name("torchft_lighthouse"))
    if not Path(program).exists():
        raise ConfigError("there is no torchft_lighthouse: pip install 'gradsieve[torchft]'")
    times = [f"--heartbeat_timeout_ms={_HEARTBEAT_MS}", f"--join_timeout_ms={_JOIN_MS}"]
    command = [program, f"--bind=127.0.0.1:{port}", f"--min_replicas={least}", *times]
    return subprocess.Popen(
        [*command, f"--quorum_tick_ms={_TICK_MS}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


@contextlib.contextmanager
def lighthouse(least: int) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = start_lighthouse(least, port)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


class Campaign:
    def __init__(self, plan: Plan, faults: Faults, address: str, folder: Path) -> None:
        self.plan, self.faults, self._address, self._folder = plan, faults, address, folder
        self._context = multiprocessing.get_context("forkserver")
        # The first optimizer of a process would load dynamo.
        self._context.set_forkserver_preload([torch_names.LOADED_BEFORE_RANKS, live.__module__])
        self.running: dict[int, Life] = {}
        self._lives = dict.fromkeys(range(plan.replicas), 0)
        self._course = _Course()
        self._is_going = False
        self._kills = False
        self._chance = random.Random(plan.seed)
        self._step_seconds = 0.1

    def run(self, advance: Callable[[int], None] = lambda steps: None) -> dict[str, Any]:
        try:
            for number in range(self.plan.replicas):
                self._start(number)
            start, done, heard = time.monotonic(), 0, time.monotonic()
            while not self.is_over():
                for number, message in self._messages():
                    heard = time.monotonic()
                    if message["event"] == "ready" and not self._is_going and self._all_ready():
                        self._is_going, start = True, heard
                        self._let_go(list(self.running))
                    if message["event"] == "step":
                        self._stepped(number, message["step"])
                        advance(max(0, message["step"] - done))
                        done = max(done, message["step"])
                        self._step_seconds = (heard - start) / max(1, done)
                self._strike_if_due()
                self._continue_stopped()
                if time.monotonic() - heard > _SILENCE:
                    raise GradsieveError(f"no replica has said anything for {_SILENCE:g} s:\n{self._logs()}")
            return self._row(time.monotonic() - start)
        finally:
            for one in self.running.values():
                one.process.kill()
                one.process.join()
                one.pipe.close()

    # -- replicas ---------------------------------------------------------------------------------------

    def _start(self, number: int) -> None:
        ours, theirs = self._context.Pipe()
        life = self._lives[number]
        self._lives[number] += 1
        log = self._folder / f"replica{number}.{life}"
        process = self._context.Process(
            target=live, args=(number, life, self.plan, self._address, str(log), theirs)
        )
        process.start()
        theirs.close()
        self.running[number] = Life(f"{number}.{life}", process, ours, log)

    def _all_ready(self) -> bool:
        return all(one.step >= 0 for one in self.running.values())

    def _let_go(self, numbers: list[int]) -> None:
        for number in numbers:
            self.running[number].pipe.send_bytes(b"go")

    def _messages(self) -> Iterator[tuple[int, dict[str, Any]]]:
        pipes = {one.pipe: number for number, one in self.running.items() if one.ended is None}
        for pipe in connection.wait(list(pipes), 0.01):
            number = pipes[pipe]  # type: ignore[index]  # these are all that it is given
            one = self.running[number]
            try:
                message = json.loads(one.pipe.recv_bytes(1 << 20))
            except (EOFError, OSError):
                one.process.join()
                raise GradsieveError(
                    f"replica {number} ended by itself, with code {one.process.exitcode}:\n{self._logs()}"
                ) from None
            if message["event"] == "ready":
                one.step = 0
                if self._is_going:
                    self._let_go([number])
            elif message["event"] == "step":
                one.step = message["step"]
            else:
                one.ended = message
            yield number, message

    def is_over(self) -> bool:
        """Return whether all replicas that made the last exchange and live have ended; latecomers wait in
        vain."""
        living = {one.name for one in self.running.values()}
        ended = {one.name: one.ended for one in self.running.values() if one.ended is not None}
        last = {name for message in ended.values() for name in message["present"]}
        return bool(ended) and last & living <= ended.keys()

    def _logs(self) -> str:
        for one in self.running.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(one.process.pid, signal.SIGUSR1)
        time.sleep(1.0)
        return "\n".join(f"-- {one.log.name}\n{one.log.read_text()[-3000:]}" for one in self.running.values())

    # -- faults -----------------------------------------------------------------------------------------

    def _stepped(self, number: int, step: int) -> None:
        course, faults = self._course, self.faults
        if number in course.away:
            if step >= max(one.step for one in self.running.values()):  # not what it had begun before
                del course.away[number]
                course.back += 1
        elif course.struck is not None and step >= course.struck[1] + 2:
            course.gone.append(time.monotonic() - course.struck[0])
            course.struck = None
        kills = bool(faults.kill_every) and step // faults.kill_every > course.kills
        stops = bool(faults.stop_every) and step // faults.stop_every > course.stops
        if (kills or stops) and course.due is None and step < self.plan.steps:
            # Anywhere in the next step: in its forward, its quorum, its exchange or its vote.
            course.due = time.monotonic() + self._chance.random() * self._step_seconds
            course.kills, course.stops = course.kills + kills, course.stops + (stops and not kills)
            self._kills = kills

    def _strike_if_due(self) -> None:
        course = self._course
        if course.due is None or time.monotonic() < course.due:
            return
        there = [number for number in self.running if number not in course.away]
        number = there[(course.kills + course.stops) % len(there)]
        one, now = self.running[number], time.monotonic()
        course.due, course.struck = None, (now, max(each.step for each in self.running.values()))
        if one.ended is not None:
            return
        if not self._kills:
            course.away[number] = now + self.faults.stop_seconds
            one.is_stopped = True
            os.kill(one.process.pid, signal.SIGSTOP)
            return
        os.kill(one.process.pid, signal.SIGKILL)
        one.process.join()
        one.pipe.close()
        course.away[number] = now
        self._start(number)

    def _continue_stopped(self) -> None:
        for number, until in self._course.away.items():
            one = self.running[number]
            if one.is_stopped and time.monotonic() >= until:
                os.kill(one.process.pid, signal.SIGCONT)
                one.is_stopped = False

    def _row(self, seconds: float) -> dict[str, Any]:
        ended = [one.ended for one in self.running.values() if one.ended is not None]
        course, gone = self._course, self._course.gone
        return {
            "training": "disturbed" if course.kills + course.stops else "undisturbed",
            "final": next((each["final"] for each in ended if "final" in each), None),
            "seconds": seconds,
            "kills": course.kills,
            "stops": course.stops,
            "back": course.back,
            "failed": max(each["exchanges_failed"] for each in ended),
            "replicas_at_end": len(ended),
            "replicas_missing": ended[0]["replicas_missing"],
            "replicas_returned": ended[0]["replicas_returned"],
            "lost_mass": ended[0]["lost_mass"],
            "losses": ended[0]["losses"],
            "gone_s": statistics.median(gone) if gone else None,
            "gone_most_s": max(gone) if gone else None,
            "alike": len({each["digest"] for each in ended}) == 1,
        }


def measure(
    plan: Plan, faults: Faults, advance: Callable[[int], None] = lambda steps: None
) -> dict[str, Any]:
    """Run one training and return its row."""
    with (
        ended_with_us(),
        tempfile.TemporaryDirectory(prefix="gradsieve-elastic-") as folder,
        lighthouse(plan.least) as address,
    ):
        return Campaign(plan, faults, address, Path(folder)).run(advance)
