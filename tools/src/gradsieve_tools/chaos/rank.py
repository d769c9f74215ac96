"""A rank's program in an episode: load the checkpoint, take a few steps, save; and suffer a fault.

Messages are JSON, each with its `event`: `fired` before a fault, `step` after each step, `saved` or `refused`
after a save or load, `left` after a notice, `ended`.
"""

from __future__ import annotations

import gc
import math
import os
import resource
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore

import gradsieve
from gradsieve import GradientSync
from gradsieve.comm import sockets
from gradsieve.errors import GradsieveError, MismatchError, PeerError, RefusedError
from gradsieve.schemes import AllToAll, Exchange, Op
from gradsieve.testing import digest, kernels
from gradsieve_tools.chaos.fleet import DONE, FAILED, PEER_FAILED, Tell, teller
from gradsieve_tools.chaos.ground import enter
from gradsieve_tools.chaos.kinds import BATCH_BYTES, KINDS, MIXED, NOTICE, Must, Scene, form
from gradsieve_tools.chaos.schedule import MIDDLE, WORLD, Chance

_SIZES = {"matrix": (100, 60), "vector": (40,)}


@dataclass(frozen=True, slots=True)
class Episode:
    scheme: str
    steps: int
    deadline: float
    seed: int
    store: tuple[str, int]  # host and port
    case: str  # unique in the store
    folder: str
    interface: str = "lo"
    namespaces: tuple[str | None, ...] = (None,) * WORLD
    chance: Chance | None = None
    fresh: bool = False  # there is no checkpoint yet
    saves: bool = True
    store_pid: int = 0


class Training:
    def __init__(self, rank: int, episode: Episode, tell: Tell) -> None:
        self.rank, self.episode, self.tell, self.folder = rank, episode, tell, Path(episode.folder)
        chance = episode.chance
        self._chance = chance if chance is not None and chance.rank == rank else None
        if self._chance is not None and self._chance.kind == MIXED:
            tell({"event": "fired", "at": time.monotonic(), "op": "", "step": -1})
            gradsieve.version.VERSION += "+another"
        store = TCPStore(*episode.store, is_master=False, wait_for_workers=False)
        dist.init_process_group(
            "gloo",
            store=PrefixStore(episode.case, store),
            rank=rank,
            world_size=WORLD,
            timeout=timedelta(seconds=episode.deadline),
        )
        random = torch.Generator(device="cpu").manual_seed(episode.seed)
        self.parameters = {
            name: torch.nn.Parameter(torch.randn(size, generator=random, dtype=torch.float32, device="cpu"))
            for name, size in _SIZES.items()
        }
        self.optimizer = torch.optim.SGD(self.parameters.values(), lr=0.1, momentum=0.9)
        self.sync = GradientSync(self.parameters.items(), self.optimizer, scheme=episode.scheme, density=0.05)
        self.sync.heed_preemption([NOTICE])
        self._loaded, self._first = episode.fresh, 0
        self._perform_usual = self.sync.engine.perform
        self._earlier: dict[tuple[object, ...], Tensor] = {}
        self._ops: dict[int, int] = {}  # begun, by step
        self._timer: threading.Timer | None = None
        self._digests: dict[int, tuple[int, int]] = {}  # of the shared state and of all, by step
        self.sync.engine.perform = self._perform  # type: ignore[method-assign]  # the seam that is wrapped

    def run(self) -> int:
        """Return the exit code."""
        self._before = self._digest_of_all()
        try:
            self._go()
        except (GradsieveError, RuntimeError, MemoryError) as error:
            kind, said, ranks = type(error).__name__, str(error), getattr(error, "ranks", ())
            at, code = time.monotonic(), PEER_FAILED if isinstance(error, PeerError) else FAILED
        else:
            kind, said, ranks, at, code = "", "", (), time.monotonic(), DONE
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))  # to report how it ended takes memory
        kept = code == DONE or self._before == self._digest_of_all()
        message: dict[str, Any] = {"event": "ended", "error": kind, "said": said, "at": at}
        message |= {"ranks": list(ranks), "kept": kept, "ops": self._ops}
        self._earlier.clear()
        self.sync.abandon()
        del self.sync, self._perform_usual
        dist.destroy_process_group()
        gc.collect()
        message["threads"] = [
            each.name for each in threading.enumerate() if each.name.startswith("gradsieve")
        ]
        message["connections"] = len(sockets.connected(self.episode.store[1]))
        self.tell(message)
        return code

    def _go(self) -> None:
        if not self.episode.fresh:
            if not self._or_refused(self.sync.load):
                self.sync.load(self.folder)
            self._loaded = True
        self._first = self.sync.pipeline.step
        self._note()
        for step in range(self._first, self._first + self.episode.steps):
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

    def _set_gradients(self, step: int) -> None:
        random = torch.Generator(device="cpu").manual_seed(1000 * (step + 1) + self.rank + self.episode.seed)
        for parameter in self.parameters.values():
            parameter.grad = torch.randn(parameter.shape, generator=random, dtype=torch.float32, device="cpu")

    def _save(self) -> None:
        if self._or_refused(self.sync.save):
            self.tell({"event": "saved", "step": self.sync.pipeline.step})

    def _or_refused(self, call: Callable[[Path], None]) -> bool:
        """Return whether the call was done. A refusal is survived if the fault is one that can be."""
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
        stored = self.sync.state_dict().items()
        shared = int(digest(part for key, part in stored if "/shared" in key))
        self._before = self._digest_of_all()
        step = self.sync.pipeline.step
        self._digests[step] = (shared, self._before)
        residual = math.hypot(*(float(part.norm()) for part in self.sync.pipeline.residuals()))
        self.tell({"event": "step", "step": step, "digests": self._digests, "residual": residual})

    def _digest_of_all(self) -> int:
        """Return a digest of all that a failed step must leave alone on this rank."""
        own = [parameter.detach() for parameter in self.parameters.values()]
        return int(digest([*own, *self.sync.state_dict().values()]))

    # -- the fault ------------------------------------------------------------------------------------

    def _perform(self, op: Op) -> Tensor:
        step = self.sync.pipeline.step - self._first if self._loaded else -1
        index = self._ops.get(step, 0)
        self._ops[step] = index + 1
        chance = self._chance
        if chance is not None and (step, index) >= (chance.step, chance.op):
            if chance.delay:
                self._chance = None
                self._timer = threading.Timer(chance.delay, self._happen, (op, chance))
                self._timer.daemon = True
                self._timer.start()
            elif (changed := self._happen(op, chance)) is not None:
                self._chance = None
                if chance.kind == "truncated":
                    self._break_off(op)
                given = self._perform_usual(changed)
                if (spoil := KINDS[chance.kind].spoils) is not None:
                    spoil(given, self._scene(chance))
                return given
        self._earlier[form(op)] = op.tensor.clone()
        return self._perform_usual(op)

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
            *(self.rank, WORLD, self.folder, chance.bit, self._earlier, chance.deadline),
            *(self.episode.store_pid, self.episode.store[1], self._tell_at),
        )

    def _tell_at(self, op: str) -> None:
        step = self.sync.pipeline.step if self._loaded else -1
        self.tell({"event": "fired", "at": time.monotonic(), "op": op, "step": step})

    def _break_off(self, op: Op) -> None:
        """Send half of a message and end the connections."""
        engine = self.sync.engine
        peer = op.to if isinstance(op, Exchange) else (self.rank + 1) % WORLD
        if isinstance(op, AllToAll | Exchange):
            whole = op.tensor.contiguous()
            if isinstance(op, AllToAll):  # more than the peer's buffer holds, and gloo would abort it
                start = sum(op.send_counts[:peer])
                whole = whole[start : start + op.send_counts[peer]]
            half = whole.reshape(-1)[: whole.numel() // 2]
            for work in engine._moves(half, peer, half[:0], peer):
                torch.distributed.batch_isend_irecv([work])
        engine._end_connections()


def be_rank(rank: int, episode: Episode, pipe: Any) -> None:
    """Run the whole life of a rank's process."""
    namespace = episode.namespaces[rank]
    if namespace is not None:
        enter(namespace)
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = episode.interface
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tell = teller(pipe)
    with kernels.using("torch"):  # loading compiled ones would take longer than the case
        try:
            training = Training(rank, episode, tell)
        except MismatchError as error:
            dist.destroy_process_group()
            message = {"event": "ended", "error": type(error).__name__, "said": str(error), "ranks": []}
            tell(message | {"at": time.monotonic(), "kept": True, "threads": [], "connections": 0})
            sys.exit(FAILED)
        sys.exit(training.run())
