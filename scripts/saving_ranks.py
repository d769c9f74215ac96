"""What the ranks of `kill_saves.py` run: a training that loads what is there, and saves after each of two
steps, the second time with one rank under strace.

Messages are JSON, each with its `event`: `loaded`, and `first` and `second` before the saves, with a digest
of all that the rank goes on from; `saved`, when the second save has returned; `raised`.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradsieve
import gradsieve.checkpoint.reshard  # once, in the fork server
from gradsieve import kernels
from gradsieve.ranks_alike import digest

SETTINGS: dict[str, Any] = {"bits": 0.75}
_PATIENCE = timedelta(seconds=60)
"""Long: a death has to be noticed without it."""
BEGIN, END = "getppid", "getpgrp"
"""Calls that nothing else makes: before the save begins, and when it has returned."""
STRACE = shutil.which("strace") or "/usr/bin/strace"

kernels.active()  # likewise
kernels.encode_low(1, torch.zeros(1))


@dataclass(frozen=True, slots=True)
class Case:
    kind: str
    world: int
    store_port: int
    name: str
    """Unique in the store."""
    folder: str
    victim: int = -1
    """Is traced in its second save."""
    call: tuple[str, int] | None = None
    """The system call before which it is killed: name, and number among those of that name."""

    @property
    def log(self) -> Path:
        """What strace saw."""
        return Path(f"{self.folder}.calls")


class Rank:
    """Tells what happens; the same for every kind of training."""

    def __init__(self, number: int, case: Case, pipe: Any) -> None:
        self.number, self.case, self._pipe, self._begin = number, case, pipe, 0

    def tell(self, event: str, **more: Any) -> None:
        self._pipe.send_bytes(json.dumps({"event": event, **more}).encode())

    def loaded(self, step: int, digest: int) -> None:
        self._begin = step
        self.tell("loaded", digest=digest)

    def stepped(self, step: int, digest: int, save: Callable[[], None]) -> None:
        if step == self._begin + 1:
            self.tell("first", digest=digest)
            save()
        else:
            self.tell("second", digest=digest)
            with traced(self.case) if self.number == self.case.victim else nullcontext():
                save()
            self.tell("saved")


@contextmanager
def traced(case: Case) -> Iterator[None]:
    """All system calls of this thread go to the log; before that one the process is killed."""
    kill = ["-e", "inject={}:signal=KILL:when={}".format(*case.call)] if case.call else []
    command = [STRACE, "-qq", "-s", "16", "-o", str(case.log), *kill, "-p", str(os.getpid())]
    seen = os.open(case.log, os.O_RDONLY | os.O_CREAT)
    tracer = subprocess.Popen(command)
    # Until here nothing is counted that a save does: it reads no file that it has open.
    while BEGIN.encode() not in os.pread(seen, 1 << 16, 0):
        if tracer.poll() is not None:
            raise RuntimeError("strace did not start: the reason stands above")
        time.sleep(0.002)
        os.getppid()
    os.getppid()
    yield
    os.getpgrp()
    tracer.terminate()
    tracer.wait()
    os.close(seen)


def tensors_of(state: dict[str, Any], optimizer: torch.optim.Optimizer) -> int:
    """A digest of the sync's state and the optimizer's."""
    every = [each for _, each in sorted(state.items()) if isinstance(each, Tensor)]
    for memory in optimizer.state.values():
        every += [each for _, each in sorted(memory.items()) if isinstance(each, Tensor)]
    return int(digest([getattr(each, "_local_tensor", each).detach() for each in every]))


def model() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Linear(32, 61), nn.Tanh(), nn.Linear(61, 62), nn.LayerNorm(62), nn.Linear(62, 62), nn.Linear(62, 3)
    )


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    chance = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(8, 32, generator=chance)
    return inputs, inputs[:, :3].argmax(1)


def by_hand(rank: Rank, net: nn.Module, optimizer: torch.optim.Optimizer, sync: Any) -> None:
    folder = Path(rank.case.folder)
    if any(folder.iterdir()):
        sync.load(folder)
        rank.loaded(sync.pipeline.step, tensors_of(sync.state_dict(), optimizer))
    for _ in range(2):
        inputs, labels = batch(sync.pipeline.step, rank.number)
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(inputs), labels).backward()
        optimizer.step()
        state = tensors_of(sync.state_dict(), optimizer)
        rank.stepped(sync.pipeline.step, state, lambda: sync.save(folder))


def ddp(rank: Rank) -> None:
    net = DistributedDataParallel(model())
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    by_hand(rank, net, optimizer, gradsieve.attach(net, optimizer, **SETTINGS))


def hsdp(rank: Rank) -> None:
    """Two hosts of two ranks each."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    net = model()
    fully_shard(net, mesh=mesh["shard"])
    # DTensor plans every operation of an optimizer anew in every process: Adam's would take most of the time.
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, foreach=True)
    by_hand(rank, net, optimizer, gradsieve.attach(net, optimizer, replicate=mesh["replicate"], **SETTINGS))


def by_lightning(rank: Rank) -> None:
    from saving_lightning import train  # takes long to load, and the others do not need it

    train(rank)


KINDS = {"ddp": ddp, "hsdp": hsdp, "lightning": by_lightning}
WORLDS = {"ddp": 2, "hsdp": 4, "lightning": 2}


def be_rank(number: int, case: Case, pipe: Any) -> None:
    """The whole life of a rank's process."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started the ranks ends them
    warnings.simplefilter("ignore")
    for name in ("lightning", "lightning.pytorch", "gradsieve"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    tempfile.tempdir = str(Path(case.folder).parent)  # Lightning renames its file from there
    rank = Rank(number, case, pipe)
    try:
        server = dist.TCPStore("127.0.0.1", case.store_port, is_master=False, wait_for_workers=False)
        store = dist.PrefixStore(case.name, server)
        dist.init_process_group("gloo", store=store, rank=number, world_size=case.world, timeout=_PATIENCE)
        KINDS[case.kind](rank)
    except BaseException as error:
        rank.tell("raised", error=type(error).__name__, said=str(error)[:500])
        sys.stderr.flush()
        os._exit(1)  # torch's threads and the end of Python race after a failure: not what is tested here
    os._exit(0)
