"""W real processes, joined by gloo on the loopback, that run functions which tests hand to them.

    with Ranks(4) as ranks:
        answers = ranks.run(scenario, "exdyna", steps=5)      # scenario(rank, "exdyna", steps=5) on each

A fork server loads torch and gradsieve once (`loaded.py`); ranks are forked from it, live as long as the pool
and get a process group of their own for every call. Each rank's end is looked at: an exception, a death or
a hang of any of them fails the call, with the rank, its traceback and, for a hang, the stacks of all ranks.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from typing_extensions import Self

os.environ.setdefault("OMP_NUM_THREADS", "1")  # no thread in the fork server: threads do not survive a fork
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["multiproc.loaded"])
_TO_DUMP = 1.0
_TO_END = 10.0


class RankFailure(AssertionError):  # noqa: N818 - it is raised like an assertion
    """Some rank did not come to a good end."""


@dataclass(frozen=True)
class Call:
    """What a rank is asked to do, and with whom."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    settings: dict[str, Any]
    store: str
    group_timeout: float
    meets_at_end: bool


@dataclass(frozen=True)
class Answer:
    """How a call ended on one rank: with a value, an exception (its traceback), or the end of the process."""

    value: Any = None
    error: str | None = None
    exit_code: int | None = None

    @property
    def is_good(self) -> bool:
        return self.error is None and self.exit_code is None


@dataclass
class Ranks:
    """A pool of processes, started when first used and anew after a failure."""

    world: int
    _processes: list[Any] = field(default_factory=list)
    _pipes: list[connection.Connection] = field(default_factory=list)
    _folder: Path | None = None
    _calls: int = 0

    def run(
        self, function: Callable[..., Any], *args: Any, timeout: float = 60.0, **settings: Any
    ) -> list[Any]:
        """What `function(rank, *args, **settings)` returned on each rank; raises if any rank failed."""
        answers = self.outcomes(function, *args, timeout=timeout, meets_at_end=True, **settings)
        if not all(answer.is_good for answer in answers):
            self.kill()
            raise RankFailure("\n".join(_describe(rank, answer) for rank, answer in enumerate(answers)))
        return [answer.value for answer in answers]

    def outcomes(
        self,
        function: Callable[..., Any],
        *args: Any,
        timeout: float = 60.0,
        group_timeout: float = 20.0,
        meets_at_end: bool = False,
        **settings: Any,
    ) -> list[Answer]:
        """How the call ended on each rank, good or bad; raises only for a hang."""
        if not self._processes:
            self._start()
        self._calls += 1
        store = f"{self._folder}/store{self._calls}"
        call = pickle.dumps(Call(function, args, settings, store, group_timeout, meets_at_end))
        for pipe in self._pipes:
            pipe.send_bytes(call)
        return self._collect(time.monotonic() + timeout, f"{function.__name__} after {timeout:g} s")

    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def kill(self) -> None:
        """End all ranks, whatever they do."""
        for process in self._processes:
            process.kill()
        self._forget()

    def close(self) -> None:
        """Ask all ranks to leave; each must go by itself, with code 0, leaving no child behind."""
        if not self._processes:
            return
        strays = {rank: _children(process.pid) for rank, process in enumerate(self._processes)}
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):
                pipe.send_bytes(b"")
        for process in self._processes:
            process.join(_TO_END)
        codes = {rank: process.exitcode for rank, process in enumerate(self._processes)}
        self.kill()
        if any(strays.values()):
            raise RankFailure(f"child processes left behind, by rank: {strays}")
        if any(code != 0 for code in codes.values()):
            raise RankFailure(f"exit codes by rank (None: did not leave in {_TO_END:g} s): {codes}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):  # it finds what we find
            forkserver.ensure_running()
        self._folder = Path(tempfile.mkdtemp(prefix="gradsieve-ranks-"))
        for rank in range(self.world):
            ours, theirs = _CONTEXT.Pipe()
            process = _CONTEXT.Process(target=_serve, args=(rank, self.world, theirs, str(self._folder)))
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def _collect(self, deadline: float, what: str) -> list[Answer]:
        answers: dict[int, Answer] = {}
        while len(answers) < self.world:
            waiting = {self._pipes[rank]: rank for rank in range(self.world) if rank not in answers}
            ready = connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                ended = [_describe(rank, answer) for rank, answer in sorted(answers.items())]
                stacks = self._stacks(sorted(waiting.values()))
                self.kill()
                raise RankFailure("\n".join([f"hang in {what}", *ended, *stacks]))
            for pipe in ready:
                answers[waiting[pipe]] = self._receive(waiting[pipe])
        return [answers[rank] for rank in range(self.world)]

    def _receive(self, rank: int) -> Answer:
        try:
            answer: Answer = pickle.loads(self._pipes[rank].recv_bytes())  # noqa: S301 - from our own child
        except (EOFError, ConnectionResetError):
            self._processes[rank].join(_TO_END)
            return Answer(exit_code=self._processes[rank].exitcode)
        return answer

    def _stacks(self, ranks: list[int]) -> list[str]:
        for rank in ranks:
            os.kill(self._processes[rank].pid, signal.SIGUSR1)
        time.sleep(_TO_DUMP)
        return [f"rank {rank} hangs at\n{Path(f'{self._folder}/stacks{rank}').read_text()}" for rank in ranks]

    def _forget(self) -> None:
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []
        if self._folder is not None:
            shutil.rmtree(self._folder)
            self._folder = None


def _describe(rank: int, answer: Answer) -> str:
    if answer.error is not None:
        return f"rank {rank} raised\n{answer.error}"
    return f"rank {rank} was fine" if answer.is_good else f"rank {rank} ended with code {answer.exit_code}"


def _children(pid: int | None) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def _serve(rank: int, world: int, pipe: connection.Connection, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with Path(f"{folder}/stacks{rank}").open("w") as stacks:
        faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
        with contextlib.suppress(EOFError):  # the test process is gone
            while message := pipe.recv_bytes():
                pipe.send_bytes(pickle.dumps(_answer(rank, world, message)))


def _answer(rank: int, world: int, message: bytes) -> Answer:
    try:
        call: Call = pickle.loads(message)  # noqa: S301 - from our own parent
        timeout = timedelta(seconds=call.group_timeout)
        dist.init_process_group(
            "gloo", init_method=f"file://{call.store}", rank=rank, world_size=world, timeout=timeout
        )
        value = call.function(rank, *call.args, **call.settings)
        pickle.dumps(value)
        if call.meets_at_end:
            dist.barrier()
    except Exception:
        return Answer(error=traceback.format_exc())
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return Answer(value)
