"""A rank's program in an episode: load the checkpoint, go a few steps on, save; and whatever happens.

Messages are JSON, each with its `event`: `fired` before a fault, `step` after each step, `ended`.
"""

from __future__ import annotations

import math
import resource
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradsieve.comm.ops import AllToAll, Exchange, Op
from gradsieve.errors import GradsieveError, PeerError
from gradsieve.lab.chaos.ground import enter
from gradsieve.lab.chaos.kinds import BATCH_BYTES, KINDS, BrokenOffError, Must, Scene, form
from gradsieve.lab.chaos.schedule import MIDDLE, Chance
from gradsieve.lab.faults.trained import DONE, FAILED, PEER_FAILED, Task, Tell, Training, live


@dataclass(frozen=True, slots=True)
class Episode:
    task: Task
    folder: str
    world: int
    interface: str
    namespaces: tuple[str | None, ...]
    chance: Chance | None
    fresh: bool = False
    """There is no checkpoint yet."""
    saves: bool = True


class ChaosTraining(Training):
    def __init__(self, rank: int, episode: Episode, tell: Tell) -> None:
        super().__init__(rank, episode.world, episode.task, None, tell)
        self.episode, self.folder = episode, Path(episode.folder)
        self._loaded = episode.fresh
        self._usual = self.sync.engine.perform
        self._earlier: dict[tuple[object, ...], Tensor] = {}
        self._begun: dict[int, int] = {}
        self._timer: threading.Timer | None = None
        chance = episode.chance
        self._waiting = chance if chance is not None and chance.rank == rank else None
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
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))  # to tell how it ended takes memory
        kept = code == DONE or self.before == self._all()
        del self._usual
        self._earlier.clear()
        self._end(kind, said, at, ranks, kept)
        return code

    def _go(self) -> None:
        if not self.episode.fresh:
            self.sync.load(self.folder)
            self._loaded = True
        self._first = self.sync.pipeline.step
        self._note()
        for step in range(self._first, self._first + self.task.steps):
            if self.episode.saves and step == self._first + MIDDLE:
                self.sync.save(self.folder)
            batch = torch.empty(BATCH_BYTES, dtype=torch.uint8, device="cpu")
            self._set_gradients(step)
            del batch
            self.sync.reduce()
            self.optimizer.step()
            self._note()
        if self._timer is not None:
            self._timer.join()
        if self.episode.saves:
            self.sync.save(self.folder)

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
                return self._usual(changed)
        self._earlier[form(op)] = op.tensor.clone()
        return self._usual(op)

    def _happen(self, op: Op, chance: Chance) -> Op | None:
        scene = Scene(self.rank, self.episode.world, self.folder, chance.bit, self._earlier)
        told = {"event": "fired", "at": time.monotonic(), "op": type(op).__name__}
        told["step"] = self.sync.pipeline.step if self._loaded else -1
        damages = chance.must is Must.DAMAGE  # which may have to wait for another op
        if not damages:
            self.tell(told)
        changed = KINDS[chance.kind].strike(op, scene)
        if damages and changed is not None:
            self.tell(told)
        return changed

    def _break_off(self, op: Op) -> None:
        """Half of a message, and the end of the connections."""
        engine = self.sync.engine
        peer = op.to if isinstance(op, Exchange) else (self.rank + 1) % self.episode.world
        if isinstance(op, AllToAll | Exchange):
            whole = op.tensor.contiguous()
            if isinstance(op, AllToAll):  # more than the peer has room for, and gloo would abort it
                start = sum(op.send_counts[:peer])
                whole = whole[start : start + op.send_counts[peer]]
            half = whole.reshape(-1)[: whole.numel() // 2]
            for work in engine._moves(half, peer, half[:0], peer):
                torch.distributed.batch_isend_irecv([work])
        engine._end_connections()
        raise BrokenOffError("the connection ended in the middle of a message")


def be_rank(rank: int, episode: Episode, pipe: Any) -> None:
    namespace = episode.namespaces[rank]
    if namespace is not None:
        enter(namespace)
    live(episode.interface, lambda tell: ChaosTraining(rank, episode, tell), pipe)
