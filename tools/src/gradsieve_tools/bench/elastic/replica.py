"""One replica of `gradsieve bench elastic`: trains a task inside torchft until it is asked to end, or killed.

Messages to the campaign are JSON, each with its `event`: `ready` before the first step, `step` after each
one that counted, `ended`.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torchft.manager import Manager

from gradsieve.frameworks.torchft import ElasticSync, Rendezvous
from gradsieve.testing import digest, kernels
from gradsieve_tools.bench.common.virtual import own_batches
from gradsieve_tools.bench.tasks import training as tasks
from gradsieve_tools.emulation.stores import store_at


@dataclass(frozen=True, slots=True)
class Plan:
    task: str
    replicas: int
    steps: int
    settings: dict[str, Any]
    seed: int
    deadline: float  # seconds an exchange waits for a replica that lives and does not come
    least: int  # least replicas that go on
    evaluated: bool = True
    patience: float = 60.0  # seconds it waits for a quorum
    retries: int = 120  # requests to the lighthouse in that time
    folder: str = ""  # folder of checkpoints; empty: none. A training resumes from what is there
    save_every: int = 0


class Learner:
    def __init__(self, number: int, life: int, plan: Plan, lighthouse: str) -> None:
        """`life` counts how often this replica was started."""
        self.plan, self.number = plan, number
        self.training = tasks.build(plan.task, plan.seed, plan.steps)
        # Another life draws other examples of the same share: which were drawn before is not known any more.
        self.batches = own_batches(
            self.training, number, plan.replicas, mixed=True, seed=plan.seed + 7 * life
        )
        self._store = store_at("127.0.0.1")
        self._rendezvous = Rendezvous()
        self.manager = Manager(
            pg=self._rendezvous,
            load_state_dict=None,
            state_dict=None,
            min_replica_size=plan.least,
            use_async_quorum=False,
            timeout=timedelta(seconds=plan.patience),
            quorum_timeout=timedelta(seconds=plan.patience),
            quorum_retries=plan.retries,
            rank=0,
            world_size=1,
            store_addr="127.0.0.1",
            store_port=self._store.port,
            lighthouse_addr=lighthouse,
            replica_id=f"replica_{number}",
            init_sync=False,  # all start with the same weights, from the seed
        )
        self.sync = ElasticSync(
            self.manager,
            self._rendezvous,
            self.training.model.named_parameters(),
            self.training.optimizer,
            name=f"{number}.{life}",
            timeout=timedelta(seconds=plan.deadline),
            **plan.settings,
        )
        if plan.folder and (Path(plan.folder) / "manifest.json").exists():
            self.sync.load(plan.folder)

    def run(self, tell: Callable[[dict[str, Any]], None]) -> None:
        while self.manager.current_step() < self.plan.steps:
            self._learn()
            if self.plan.save_every and self.manager.current_step() % self.plan.save_every == 0:
                self.sync.save(self.plan.folder)
            metrics = self.sync.metrics()
            tell(
                {"event": "step", "step": self.manager.current_step()}
                | {name: metrics[name] for name in ("replicas", "exchanges_failed", "lost_mass")}
            )
        self.sync.flush()
        metrics = self.sync.metrics()
        message = {name: value for name, value in metrics.items() if name.startswith(("replicas", "lost"))}
        message |= {
            "event": "ended",
            "losses": self.sync.losses,
            "exchanges_failed": metrics["exchanges_failed"],
        }
        message["present"] = self.sync.present
        message["digest"] = int(digest(p.detach() for p in self.training.model.parameters()))
        place = self._rendezvous.place
        if self.plan.evaluated and place is not None and place.rank == 0:
            message["final"] = self.training.evaluate()
        tell(message)

    def _learn(self) -> None:
        training, optimizer = self.training, self.training.optimizer
        rate = tasks.rate_at(self.manager.current_step(), self.plan.steps)
        batch = training.train.take(next(self.batches))
        optimizer.zero_grad()
        torch.autograd.backward(training.loss(training.model(*batch.inputs), batch.target))
        if self.sync.reduce():
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * rate
            optimizer.step()


def live(number: int, life: int, plan: Plan, lighthouse: str, log: str, pipe: Any) -> None:
    """The whole life of a replica's process."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)  # torchft logs every vote
    os.dup2(descriptor, 2)
    faulthandler.register(signal.SIGUSR1, sys.stderr, all_threads=True)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    with kernels.using("torch"):  # a replica that comes back is not to load compiled ones first
        learner = Learner(number, life, plan, lighthouse)
        pipe.send_bytes(b'{"event": "ready"}')
        pipe.recv_bytes()
        learner.run(lambda message: pipe.send_bytes(json.dumps(message).encode()))
        pipe.recv_bytes()  # no connection goes while another replica still needs it
    os._exit(0)  # torchft's threads do not end by themselves
