"""What a rank runs: a small training, with or without a fault in it, that reports how it ended.

Messages to whoever watches are JSON, each with its `event`: `fired` before a fault, `ended` at the end.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore

from gradsieve import GradientSync
from gradsieve.comm import sockets
from gradsieve.errors import GradsieveError, PeerError
from gradsieve.testing import digest, kernels
from gradsieve_tools.faults.injector import Injector
from gradsieve_tools.faults.kinds import Fault

DONE, PEER_FAILED, FAILED = 0, 10, 11
"""Exit codes of a rank."""
_SIZES = {"matrix": (100, 60), "vector": (40,)}

Tell = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class Task:
    """A training that all ranks of a case run."""

    scheme: str
    steps: int
    deadline: float
    seed: int
    store_port: int
    case: str
    """Unique in the store."""
    store_host: str = "127.0.0.1"


class Training:
    def __init__(self, rank: int, world: int, task: Task, fault: Fault | None, tell: Tell) -> None:
        self.rank, self.task, self.tell = rank, task, tell
        store = TCPStore(task.store_host, task.store_port, is_master=False, wait_for_workers=False)
        dist.init_process_group(
            "gloo",
            store=PrefixStore(task.case, store),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=task.deadline),
        )
        chance = torch.Generator(device="cpu").manual_seed(task.seed)
        self.parameters = {
            name: torch.nn.Parameter(torch.randn(size, generator=chance, dtype=torch.float32, device="cpu"))
            for name, size in _SIZES.items()
        }
        self.optimizer = torch.optim.SGD(self.parameters.values(), lr=0.1, momentum=0.9)
        self.sync = GradientSync(self.parameters.items(), self.optimizer, scheme=task.scheme, density=0.05)
        mine = fault if fault is not None and fault.rank == rank else None
        self.injector = Injector(self.sync.engine, lambda: self.sync.pipeline.step, mine, self._tell_of_fault)
        self.digests: list[int] = []

    def run(self) -> int:
        """The exit code."""
        before = self._all()
        try:
            for step in range(self.task.steps):
                self._note()
                before = self._all()
                self._set_gradients(step)
                self.sync.reduce()
                self.optimizer.step()
        except GradsieveError as error:
            at = time.monotonic()
            self._end(
                type(error).__name__, str(error), at, getattr(error, "ranks", ()), before == self._all()
            )
            return PEER_FAILED if isinstance(error, PeerError) else FAILED
        self._note()
        self._end("", "", time.monotonic(), (), True)
        return DONE

    def _set_gradients(self, step: int) -> None:
        chance = torch.Generator(device="cpu").manual_seed(1000 * (step + 1) + self.rank + self.task.seed)
        for parameter in self.parameters.values():
            parameter.grad = torch.randn(parameter.shape, generator=chance, dtype=torch.float32, device="cpu")

    def _note(self) -> None:
        """What is the same on all ranks, after so many steps as there are notes."""
        stored = self.sync.state_dict().items()
        self.digests.append(int(digest(part for key, part in stored if "/shared" in key)))

    def _all(self) -> int:
        """All that a failed step must leave alone on this rank."""
        own = [parameter.detach() for parameter in self.parameters.values()]
        return int(digest([*own, *self.sync.state_dict().values()]))

    def _tell_of_fault(self) -> None:
        self.tell({"event": "fired", "at": time.monotonic()})

    def _end(self, error: str, said: str, at: float, ranks: tuple[int, ...], kept: bool) -> None:
        message = {
            "event": "ended",
            "error": error,
            "said": said,
            "at": at,
            "ranks": list(ranks),
            "kept": kept,
        }
        message |= {"step": self.sync.pipeline.step, "digests": self.digests, "ops": self.injector.ops}
        self.sync.abandon()
        del self.sync, self.injector
        dist.destroy_process_group()
        gc.collect()
        message["threads"] = [
            each.name for each in threading.enumerate() if each.name.startswith("gradsieve")
        ]
        message["connections"] = len(sockets.connected(self.task.store_port))
        self.tell(message)


def be_rank(rank: int, world: int, task: Task, fault: Fault | None, pipe: Any) -> None:
    live("lo", lambda tell: Training(rank, world, task, fault, tell), pipe)


class Life(Protocol):
    def run(self) -> int: ...


def live(interface: str, training: Callable[[Tell], Life], pipe: Any) -> None:
    """The whole life of a rank's process."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with kernels.using("torch"):  # loading compiled ones would take longer than the case
        sys.exit(training(lambda message: pipe.send_bytes(json.dumps(message).encode())).run())
