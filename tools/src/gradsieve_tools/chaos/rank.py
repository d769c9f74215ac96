"""A rank's program in an episode: load the checkpoint, go a few steps on, save; and whatever happens.

Messages are JSON, each with its `event`: `fired` before a fault, `step` after each step, `saved` or `refused`
after a save or load, `left` after a notice, `ended`.
"""

from __future__ import annotations

import math
import resource
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import gradsieve
from gradsieve.errors import GradsieveError, MismatchError, PeerError, RefusedError
from gradsieve.schemes import AllToAll, Exchange, Op
from gradsieve_tools.chaos.ground import enter
from gradsieve_tools.chaos.kinds import BATCH_BYTES, KINDS, MIXED, NOTICE, Must, Scene, form
from gradsieve_tools.chaos.schedule import MIDDLE, Chance
from gradsieve_tools.faults.trained import DONE, FAILED, PEER_FAILED, Task, Tell, Training, live


@dataclass(frozen=True, slots=True)
class Episode:
    task: Task
    folder: str
    world: int
    interface: str
    namespaces: tuple[str | None, ...]
    chance: Chance | None
    fresh: bool = False  # there is no checkpoint yet
    saves: bool = True
    store_pid: int = 0


class ChaosTraining(Training):
    def __init__(self, rank: int, episode: Episode, tell: Tell) -> None:
        chance = episode.chance
        self._waiting = chance if chance is not None and chance.rank == rank else None
        if self._waiting is not None and self._waiting.kind == MIXED:
            tell({"event": "fired", "at": time.monotonic(), "op": "", "step": -1})
            gradsieve.version.VERSION += "+another"
        super().__init__(rank, episode.world, episode.task, None, tell)
        self.sync.heed_preemption([NOTICE])
        self.episode, self.folder = episode, Path(episode.folder)
        self._loaded = episode.fresh
        self._usual = self.sync.engine.perform
        self._earlier: dict[tuple[object, ...], Tensor] = {}
        self._begun: dict[int, int] = {}
        self._timer: threading.Timer | None = None
        self._first = 0
        self.noted: dict[int, tuple[int, int]] = {}
        self.sync.engine.perform = self._perform  # type: ignore[method-assign]  # the seam that is wrapped

    def run(self) -> int:
        self.before = self._all()
        try:
            self._go()
        except (GradsieveError, RuntimeError, MemoryError) as error:
            kind, said, ranks = type(error).__name__, str(error), getattr(error, "ranks", ())
            at, code = time.monotonic(), PEER_FAILED if isinstance(error, PeerError) else FAILED
        else:
            kind, said, ranks, at, code = "", "", (), time.monotonic(), DONE
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))  # to report how it ended takes memory
        kept = code == DONE or self.before == self._all()
        del self._usual
        self._earlier.clear()
        self._end(kind, said, at, ranks, kept)
        return code

    def _go(self) -> None:
        if not self.episode.fresh:
            if not self._or_refused(self.sync.load):
                self.sync.load(self.folder)
            self._loaded = True
        self._first = self.sync.pipeline.step
        self._note()
        for step in range(self._first, self._first + self.task.steps):
            if self.episode.saves and step == self._first + MIDDLE:
                self._save()
            batch = torch.empty(BATCH_BYTES, dtype=torch.uint8, device="cpu")
            self._set_gradients(step)
            del batch
            self.sync.reduce()
            self.optimizer.step()
            self._note()
            if self.sync.is_preempted:
                self.tell({"event": "left", "step": self.sync.pipeline.step})
                break
        if self._timer is not None:
            self._timer.join()
        if self.episode.saves:
            self._save()

    def _save(self) -> None:
        if self._or_refused(self.sync.save):
            self.tell({"event": "saved", "step": self.sync.pipeline.step})

    def _or_refused(self, call: Callable[[Path], None]) -> bool:
        """Whether it was done. A refusal is survived where the fault is one that can be."""
        try:
            call(self.folder)
        except RefusedError as error:
            chance = self.episode.chance
            if chance is None or chance.must is not Must.SURVIVE:
                raise
            self.tell({"event": "refused", "said": str(error)})
            return False
        return True

    def _note(self) -> None:
        self.before = self._all()
        super()._note()
        step = self.sync.pipeline.step
        self.noted[step] = (self.digests[-1], self.before)
        waiting = math.hypot(*(float(part.norm()) for part in self.sync.pipeline.waiting()))
        self.tell({"event": "step", "step": step, "noted": self.noted, "waiting": waiting})

    # -- the fault ------------------------------------------------------------------------------------

    def _perform(self, op: Op) -> Tensor:
        step = self.sync.pipeline.step - self._first if self._loaded else -1
        index = self._begun[step] = self._begun.get(step, -1) + 1
        chance = self._waiting
        if chance is not None and (step, index) >= (chance.step, chance.op):
            if chance.delay:
                self._waiting = None
                self._timer = threading.Timer(chance.delay, self._happen, (op, chance))
                self._timer.daemon = True
                self._timer.start()
            elif (changed := self._happen(op, chance)) is not None:
                self._waiting = None
                if chance.kind == "truncated":
                    self._break_off(op)
                given = self._usual(changed)
                if (spoil := KINDS[chance.kind].spoils) is not None:
                    spoil(given, self._scene(chance))
                return given
        self._earlier[form(op)] = op.tensor.clone()
        return self._usual(op)

    def _happen(self, op: Op, chance: Chance) -> Op | None:
        kind, name = KINDS[chance.kind], type(op).__name__
        damages = kind.must in (Must.DAMAGE, Must.DIVERGE)  # which may have to wait for another op
        if not damages and not kind.is_later:
            self._tell_at(name)
        changed = kind.strike(op, self._scene(chance))
        if damages and changed is not None:
            self._tell_at(name)
        return changed

    def _scene(self, chance: Chance) -> Scene:
        return Scene(
            *(self.rank, self.episode.world, self.folder, chance.bit, self._earlier, chance.deadline),
            *(self.episode.store_pid, self.task.store_port, self._tell_at),
        )

    def _tell_at(self, op: str) -> None:
        step = self.sync.pipeline.step if self._loaded else -1
        self.tell({"event": "fired", "at": time.monotonic(), "op": op, "step": step})

    def _break_off(self, op: Op) -> None:
        """Half of a message, and the end of the connections."""
        engine = self.sync.engine
        peer = op.to if isinstance(op, Exchange) else (self.rank + 1) % self.episode.world
        if isinstance(op, AllToAll | Exchange):
            whole = op.tensor.contiguous()
            if isinstance(op, AllToAll):  # more than the peer's buffer holds, and gloo would abort it
                start = sum(op.send_counts[:peer])
                whole = whole[start : start + op.send_counts[peer]]
            half = whole.reshape(-1)[: whole.numel() // 2]
            for work in engine._moves(half, peer, half[:0], peer):
                torch.distributed.batch_isend_irecv([work])
        engine._end_connections()


class NotBegun:
    """A training whose ranks would not begin."""

    def __init__(self, error: GradsieveError, tell: Tell) -> None:
        self._message: dict[str, Any] = {
            "event": "ended",
            "error": type(error).__name__,
            "said": str(error),
            "ranks": [],
        }
        self._message |= {"at": time.monotonic(), "kept": True, "threads": [], "connections": 0}
        self._tell = tell

    def run(self) -> int:
        dist.destroy_process_group()
        self._tell(self._message)
        return FAILED


def be_rank(rank: int, episode: Episode, pipe: Any) -> None:
    namespace = episode.namespaces[rank]
    if namespace is not None:
        enter(namespace)

    def begin(tell: Tell) -> ChaosTraining | NotBegun:
        try:
            return ChaosTraining(rank, episode, tell)
        except MismatchError as error:
            return NotBegun(error, tell)

    live(episode.interface, begin, pipe)
