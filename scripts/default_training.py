"""A default training as a user starts it: DDP, AdamW, `attach` without settings, on two gloo processes.

`closure.py` and `files_of_a_step.py` look at what of the library it uses.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WORLD, STEPS = 2, 16
PACKAGE = os.sep + "gradsieve" + os.sep


def run(look: Callable[[Callable[[int], None]], Any]) -> Any:
    """What `look` returns on rank 0; it is given a function that attaches and trains so many steps."""
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mailbox = mp.get_context("spawn").SimpleQueue()
    mp.spawn(_rank, (port, look, mailbox), nprocs=WORLD)
    return json.loads(mailbox.get())


def _rank(rank: int, port: int, look: Callable[[Callable[[int], None]], Any], mailbox: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)))
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    sync: list[Any] = []

    def train(steps: int) -> None:
        import gradsieve

        if not sync:
            sync.append(gradsieve.attach(ddp, optimizer))
        for _ in range(steps):
            optimizer.zero_grad()
            ddp(torch.randn(8, 64)).square().mean().backward()
            optimizer.step()

    found = look(train)
    if sync:
        sync[0].close()
    dist.destroy_process_group()
    if rank == 0:
        mailbox.put(json.dumps(found))


def modules() -> dict[str, int]:
    """Lines of each module of the library that is loaded."""
    loaded = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if (name == "gradsieve" or name.startswith("gradsieve.")) and file:
            with open(file, encoding="utf-8") as lines:
                loaded[name] = sum(1 for _ in lines)
    return loaded


class Tracer:
    """Files of the library in the order in which threads enter them, of threads made after it."""

    def __init__(self) -> None:
        self.visits: dict[str, list[str]] = {}
        self.is_on = False
        threading.setprofile(self._trace)
        sys.setprofile(self._trace)

    def _trace(self, frame: Any, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if not self.is_on or event != "call" or PACKAGE not in file or frame.f_code.co_name.startswith("<"):
            return
        here = self.visits.setdefault(threading.current_thread().name, [])
        name = file.rsplit(PACKAGE, 1)[1]
        if not here or here[-1] != name:
            here.append(name)
