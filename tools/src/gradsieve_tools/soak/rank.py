"""A rank's program: a small training over several units that uses everything, and looks at itself.

It sends one message at its end, JSON: all its looks.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from array import array
from dataclasses import dataclass, fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import PrefixStore, TCPStore

from gradsieve import Gradients, attach, record
from gradsieve.errors import GradsieveError
from gradsieve.parallel.ddp import DdpSync
from gradsieve_tools.chaos.fleet import DONE, Tell, teller
from gradsieve_tools.soak.verdicts import Look

EVALUATES, FLUSHES, SAVES, ASKS = 50, 400, 500, 10  # steps from one to the next
_LOOKS = 200
_UNIT_MB, _UNITS = 0.004, 3
_WIDTH = 32
# both kinds of exchange, with and without selection; one with messages of changing length
SETTINGS: dict[str, dict[str, Any]] = {
    "stripes": {"bits": 1.0},
    "exdyna": {"scheme": "exdyna", "density": 0.05, "exchange": Gradients()},
    "oktopk": {"scheme": "oktopk", "density": 0.05},
}


@dataclass(frozen=True, slots=True)
class Soak:
    scheme: str
    steps: int
    world: int
    store_port: int
    folder: str  # folder for checkpoints and records


class SoakTraining:
    def __init__(self, rank: int, soak: Soak, tell: Tell) -> None:
        self.rank, self.soak, self.tell = rank, soak, tell
        store = TCPStore("127.0.0.1", soak.store_port, is_master=False, wait_for_workers=False)
        dist.init_process_group(
            "gloo",
            store=PrefixStore(soak.scheme, store),
            rank=rank,
            world_size=soak.world,
            timeout=timedelta(seconds=60),
        )
        torch.manual_seed(1)
        layers = [layer for _ in range(_UNITS) for layer in (nn.Linear(_WIDTH, _WIDTH), nn.Tanh())]
        self.model = nn.parallel.DistributedDataParallel(
            nn.Sequential(*layers, nn.Linear(_WIDTH, 1)), bucket_cap_mb=_UNIT_MB
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.sync: DdpSync = attach(self.model, self.optimizer, **SETTINGS[soak.scheme])
        if len(self.sync.pipeline.units) != _UNITS:
            raise GradsieveError(f"{len(self.sync.pipeline.units)} units, where the soak is of {_UNITS}")
        self.recorder = record(self.sync, Path(soak.folder) / soak.scheme)
        # Of one size from the beginning: what is seen to grow is not the list of what was seen.
        self._room = array("d", [0.0]) * (len(fields(Look)) * (2 * _LOOKS + 2))
        self._taken = 0
        self._chance = torch.Generator(device="cpu").manual_seed(rank)

    def run(self) -> int:
        soak, began = self.soak, time.monotonic()
        every = max(1, soak.steps // _LOOKS)
        self.step(0)
        gc.collect()
        gc.freeze()  # what torch and numba hold is not looked through each time: that takes seconds
        for step in range(1, soak.steps + 1):
            self.step(step)
            if not step % every or step == soak.steps:
                self._look(step)
            if not self.rank and not step % 1000:
                said = f"{soak.scheme}: {step} of {soak.steps} steps, {time.monotonic() - began:.0f} s"
                print(said, file=sys.stderr, flush=True)
        self.recorder.close()
        self.sync.close()
        dist.destroy_process_group()
        self.tell({"event": "looks", "looks": self.looks()})
        return DONE

    def step(self, step: int) -> None:
        self.optimizer.zero_grad()
        loss = self._loss()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.recorder.note_loss(loss.item())
        if not step % ASKS:
            self.sync.metrics()
        if not step % EVALUATES:
            self.model.eval()
            with torch.no_grad():
                self._loss()
            self.model.train()  # type: ignore[no-untyped-call]
        if not step % FLUSHES:
            self.sync.flush()
            self.optimizer.step()  # gradients: the residual is in `.grad`
        if not step % SAVES:
            self.sync.save(Path(self.soak.folder) / f"{self.soak.scheme}-checkpoint")

    def _loss(self) -> Tensor:
        batch = torch.randn(8, _WIDTH, generator=self._chance, dtype=torch.float32, device="cpu")
        loss: Tensor = (self.model(batch) - batch.mean(1, keepdim=True)).square().mean()
        return loss

    def _look(self, step: int) -> None:
        gc.collect()  # so that what is seen is what is held
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        kilobytes = pages * os.sysconf("SC_PAGE_SIZE") / 1024
        files, threads = (len(os.listdir(f"/proc/self/{what}")) for what in ("fd", "task"))
        for figure in (step, kilobytes, len(gc.get_objects()), files, threads):
            self._room[self._taken] = figure
            self._taken += 1

    def looks(self) -> list[tuple[float, ...]]:
        width = len(fields(Look))
        return [tuple(self._room[at : at + width]) for at in range(0, self._taken, width)]


def be_rank(rank: int, soak: Soak, pipe: Any) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    sys.exit(SoakTraining(rank, soak, teller(pipe)).run())
