"""Short trainings of both ranks, as a user has them: DistributedDataParallel, AdamW and `attach`."""

from __future__ import annotations

import gc
import os
import signal
import statistics
import time
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradsieve import kernels
from gradsieve.attaching import attach
from gradsieve.errors import PeerError
from gradsieve.pipeline import StepPipeline
from gradsieve.ranks_alike import digest

_INPUTS, _HIDDEN, _CLASSES, _BATCH = 64, 256, 10, 64
_DIES_AT, _OF_STEPS = 5, 50
_DIED = "died"


@dataclass(frozen=True, slots=True)
class Here:
    rank: int
    device: torch.device
    store: dist.Store  # for messages beside the group

    def settle(self) -> None:
        """An accelerator has only queued it so far."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)


def _model(norm: type[nn.Module] = nn.LayerNorm) -> nn.Sequential:
    """Return the same weights on every rank and device."""
    torch.manual_seed(7)
    at: Any = {"dtype": torch.float32, "device": "cpu"}
    return nn.Sequential(
        nn.Linear(_INPUTS, _HIDDEN, **at),
        norm(_HIDDEN, **at),
        nn.Tanh(),
        nn.Linear(_HIDDEN, _HIDDEN, **at),
        nn.Tanh(),
        nn.Linear(_HIDDEN, _CLASSES, **at),
    )


def _batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Classes by another, linear model."""
    teacher, chance = (torch.Generator(device="cpu").manual_seed(seed) for seed in (3, 1000 * step + rank))
    inputs, weights = (
        torch.randn(rows, columns, generator=source, dtype=torch.float32, device="cpu")
        for rows, columns, source in ((_BATCH, _INPUTS, chance), (_INPUTS, _CLASSES, teacher))
    )
    return inputs, (inputs @ weights).argmax(1)


class Training:
    def __init__(self, here: Here, model: nn.Module) -> None:
        self.here, self.model = here, model
        # Not `foreach`, which is torch's default on a device and not on the CPU.
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)

    def step(self, number: int) -> float:
        inputs, labels = (each.to(self.here.device) for each in _batch(number, self.here.rank))
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(inputs), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return float(loss.detach())

    def digest(self) -> int:
        return int(digest(self.model.parameters()))


def _of_two(here: Here, model: nn.Module | None = None, **settings: Any) -> tuple[Training, Any]:
    both = Training(here, DistributedDataParallel((model or _model()).to(here.device)))
    return both, attach(both.model, both.optimizer, **settings)


def plain(here: Here, steps: int) -> dict[str, Any]:
    """Train one rank without gradsieve: does the device compute with the bits of the CPU?"""
    alone = Training(here, _model().to(here.device))
    return {"losses": [alone.step(number) for number in range(steps)], "digest": alone.digest()}


def training(here: Here, steps: int, form: str = "") -> dict[str, Any]:
    form_of_kernels: AbstractContextManager[None] = kernels.using(form) if form else nullcontext()
    with form_of_kernels:
        both, sync = _of_two(here, bits=0.75)
        losses = [both.step(number) for number in range(steps)]
        sync.verify()
        sync.flush()
        sync.close()
    return {"losses": losses, "digest": both.digest()}


def memory(here: Here, stretches: int, steps: int) -> dict[str, Any]:
    """Bytes by which the memory of the process and of the device grew in each stretch after the first one."""
    both, sync = _of_two(here, bits=0.75)
    used = []
    for stretch in range(stretches):
        for number in range(steps):
            both.step(stretch * steps + number)
        used.append(_used(here))
    sync.flush()
    sync.close()
    grown = {name: [after[name] - before[name] for before, after in pairwise(used)] for name in used[0]}
    return {"grown": grown, "model": 4 * sum(p.numel() for p in both.model.parameters())}


def _used(here: Here) -> dict[str, int]:
    here.settle()
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    used = {"process": pages * os.sysconf("SC_PAGESIZE")}
    if here.device.type != "cpu" and hasattr(torch.accelerator, "memory_allocated"):
        with suppress(RuntimeError):  # of an allocator that does not count
            used["device"] = torch.accelerator.memory_allocated(here.device)
    return used


def death(here: Here) -> dict[str, Any]:
    """Rank 1 is killed in the middle of a step; how rank 0 learns of it."""
    both, sync = _of_two(here, bits=0.75)
    try:
        for number in range(_OF_STEPS):
            if here.rank == 1 and number == _DIES_AT:
                both.model(_batch(number, here.rank)[0].to(here.device))
                here.store.set(_DIED, str(time.monotonic()))
                os.kill(os.getpid(), signal.SIGKILL)
            both.step(number)
    except PeerError as error:
        seconds = time.monotonic() - float(here.store.get(_DIED))
        sync.abandon()
        return {"named": list(error.ranks), "seconds": seconds}
    return {"named": [], "seconds": 0.0}


def batch_norm(here: Here, steps: int) -> dict[str, Any]:
    """DDP's other collectives in the same step: those of SyncBatchNorm, or broadcasts of buffers."""
    is_sync, model = _has_sync_batch_norm(here), _model(nn.BatchNorm1d)
    if is_sync:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
    both, sync = _of_two(here, model, bits=0.75)
    losses = [both.step(number) for number in range(steps)]
    sync.verify()
    sync.flush()
    both.model.eval()
    with torch.no_grad():
        both.model(_batch(steps, here.rank)[0].to(here.device))  # which broadcasts buffers once more
    sync.close()
    return {"sync": is_sync, "losses": losses, "buffers": int(digest(both.model.buffers()))}


def _has_sync_batch_norm(here: Here) -> bool:
    if here.device.type == "cpu":
        return False
    try:
        torch.batch_norm_stats(torch.ones(2, 2, dtype=torch.float32, device=here.device), 1e-5)
    except (NotImplementedError, RuntimeError):
        return False
    return True


def budget(here: Here, steps: int) -> dict[str, Any]:
    """Return what `attach(ddp, optimizer)` finds by itself."""
    both, sync = _of_two(here)
    seconds = []
    for number in range(steps):
        begin = time.perf_counter()
        both.step(number)
        seconds.append(time.perf_counter() - begin)
    assert isinstance(sync.pipeline, StepPipeline)
    found = sync.pipeline.budget
    assert found is not None
    sent = sync.metrics()["bits"]
    sync.verify()
    sync.flush()
    sync.close()
    return {
        "bits": found.bits,
        "sent": sent,
        "every": found.every,
        "chosen": found.is_chosen,
        "step seconds": statistics.median(seconds),
    }
