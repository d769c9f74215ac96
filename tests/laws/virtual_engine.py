"""An engine for virtual ranks: P real syncs in one process, whose programs advance together.

Jobs of a rank run in the order in which they were submitted, as on the real engine's thread. A program waits
at the head of its rank's queue until every rank has one there. A call that waits for a program of all ranks
needs a thread a rank: `everyone`.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from gradsieve.comm import lockstep
from gradsieve.types import Program

PATIENCE = 150.0  # seconds that a call waits for the other ranks', also on a busy machine


@dataclass
class Job:
    program: Program[Any] | None
    call: Callable[[], Any] | None
    future: Future[Any] = field(default_factory=Future)
    has_begun: bool = False


class Room:
    """Where the ranks meet."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._queues: list[deque[Job]] = [deque() for _ in range(world)]
        self._lock = threading.RLock()
        self._is_closed = False
        self._threads = [ThreadPoolExecutor(1) for _ in range(world)]
        """A rank's forward and backward are of one thread, as in a process of its own."""

    def put(self, rank: int, job: Job) -> Future[Any]:
        with self._lock:
            if self._is_closed and job.program is not None:
                job.future.set_exception(TimeoutError("the room is closed"))
            else:
                self._queues[rank].append(job)
                self._advance()
        return job.future

    def everyone(self, call: Callable[[int], Any]) -> list[Any]:
        """On all ranks at once; the first error of any of them is raised."""
        return [future.result(timeout=PATIENCE) for future in self.all_of(call)]

    def all_of(self, call: Callable[[int], Any]) -> list[Future[Any]]:
        return [thread.submit(call, rank) for rank, thread in enumerate(self._threads)]

    def abandon(self) -> None:
        """Nobody else comes: whoever waits is told."""
        with self._lock:
            for queue in self._queues:
                while queue:
                    queue.popleft().future.set_exception(TimeoutError("no other rank came"))

    def close(self) -> None:
        """Where a rank failed, the others wait for it: they are told first."""
        self.abandon()
        self._is_closed = True
        self.abandon()
        for thread in self._threads:
            thread.shutdown()

    def _advance(self) -> None:
        moved = True
        while moved:
            moved = False
            for queue in self._queues:
                while queue and (queue[0].call is not None or _ends_alone(queue[0])):
                    _do(queue.popleft())
                    moved = True
            if all(self._queues):
                self._meet([queue.popleft() for queue in self._queues])
                moved = True

    def _meet(self, jobs: list[Job]) -> None:
        errors: dict[int, BaseException] = {}
        programs = [_guarded(job.program, rank, errors) for rank, job in enumerate(jobs) if job.program]
        try:
            with torch.no_grad():
                results = lockstep.run(programs)
        except BaseException as error:
            for job in jobs:
                job.future.set_exception(error)
            return
        for rank, job in enumerate(jobs):
            if rank in errors:
                job.future.set_exception(errors[rank])
            else:
                job.future.set_result(results[rank])


def _guarded(program: Program[Any], rank: int, errors: dict[int, BaseException]) -> Program[Any]:
    """An error of one rank is that rank's own."""
    try:
        return (yield from program)
    except Exception as error:
        errors[rank] = error


def _ends_alone(job: Job) -> bool:
    """Whether the program ends before its first op: as on the real engine, no other rank is waited for."""
    assert job.program is not None
    if job.has_begun:
        return False
    job.has_begun = True
    try:
        with torch.no_grad():
            op = job.program.send(None)
    except StopIteration as end:
        job.call = partial(_return, end.value)
    except Exception as error:
        job.call = partial(_raise, error)
    else:
        job.program = _resumed(op, job.program)
    return job.call is not None


def _resumed(op: Any, program: Program[Any]) -> Program[Any]:
    """Go on with a program that has yielded its first op."""
    while True:
        reply = yield op
        try:
            op = program.send(reply)
        except StopIteration as end:
            return end.value


def _return(value: Any) -> Any:
    return value


def _raise(error: Exception) -> None:
    raise error


def _do(job: Job) -> None:
    assert job.call is not None
    try:
        with torch.no_grad():
            result = job.call()
    except BaseException as error:
        job.future.set_exception(error)
    else:
        job.future.set_result(result)


class VirtualEngine:
    """As `gradsieve.comm.engine.Engine`."""

    def __init__(self, room: Room, rank: int) -> None:
        self.room, self.rank, self.world = room, rank, room.world

    def submit(self, program: Program[Any], what: str, device: torch.device) -> Future[Any]:
        return self.room.put(self.rank, Job(program, None))

    def call(self, call: Callable[[], Any], device: torch.device) -> Future[Any]:
        return self.room.put(self.rank, Job(None, call))

    def run(self, program: Program[Any], what: str, device: torch.device) -> Any:
        return self.submit(program, what, device).result(timeout=PATIENCE)

    def called(self, call: str, step: int) -> Any:
        return contextlib.nullcontext()

    def meet(self, call: str, step: int) -> None:
        pass

    def assume_links(self) -> None:
        """There are none."""

    def agree_on_secret(self, device: torch.device) -> None:
        pass

    def close(self) -> None:
        pass
