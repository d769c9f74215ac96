"""One rank of `gradsieve bench step`: all syncs take turns on the same model, in the same processes.

A turn is a few consecutive training steps between two barriers. Turns go round-robin, so that a noisy
machine is noisy for all syncs alike; ratios are formed within a round. Two models stand ready because
torch's PowerSGD hook needs one large bucket on gloo (it mismatches collectives with more); the others use
DDP's default buckets.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradsieve.bench.in_lab import bytes_out, most_anywhere, run_rank, tell
from gradsieve.bench.rivals import bucket_cap_mb, torch_hook
from gradsieve.bench.workloads import batch_for, build
from gradsieve.integrations.ddp import DdpSync

_WARM_STATEFUL, _WARM = 10, 2
"""Steps before the clock runs: thresholds and partitions settle, DDP rebuilds its buckets."""
_TURN_SECONDS, _MOST_STEPS = 1.5, 5


class Arena:
    """A DDP model whose communication hook can be changed between steps."""

    def __init__(self, model: nn.Module, bucket_cap_mb: float | None) -> None:
        self.ddp = DistributedDataParallel(
            model, bucket_cap_mb=bucket_cap_mb, gradient_as_bucket_view=True, init_sync=False
        )
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.01, momentum=0.9)
        # Set by whoever's turn it is:
        self.hook: Callable[[Any], Any]
        self.before_step: Callable[[], None]
        self.ddp.register_comm_hook(None, lambda _, bucket: self.hook(bucket))

    def step(self, inputs: Tensor, target: Tensor) -> None:
        self.optimizer.zero_grad()
        torch.autograd.backward(nn.functional.mse_loss(self.ddp(inputs), target))
        self.before_step()
        self.optimizer.step()


class Contestant:
    """One sync: its hook on its arena, and what was measured of it."""

    def __init__(self, name: str, arena: Arena, density: float) -> None:
        self.name, self.arena = name, arena
        self.seconds: list[float] = []
        self.bytes = 0
        self.steps = 0
        self.sent = 0
        self.stages: dict[str, float] = {}
        self.sync: DdpSync | None = None
        self.hook = self._hook(density)

    def _hook(self, density: float) -> Callable[[Any], Any]:
        torchs = torch_hook(self.name)
        if torchs is not None:
            state, hook = torchs
            return partial(hook, state)
        # Replicas drift apart in noop's turns, so the sync must not watch this optimizer for divergence.
        unwatched = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
        self.sync = DdpSync(self.arena.ddp, unwatched, scheme=self.name, density=density)
        return self.sync.hook

    @property
    def warm_steps(self) -> int:
        return _WARM if self.name in ("noop", "dense", "fp16") else _WARM_STATEFUL

    def run(self, batch: tuple[Tensor, Tensor], steps: int, measured: bool) -> float:
        """`steps` training steps between two barriers; seconds a step."""
        self.arena.hook, self.arena.before_step = self.hook, self._before_step
        dist.barrier()
        before, start = bytes_out(), time.perf_counter()
        for _ in range(steps):
            self.arena.step(*batch)
            if self.sync is not None and measured:
                stats = self.sync.pipeline.stats
                self.sent += stats.sent
                for stage, seconds in stats.seconds.items():
                    self.stages[stage] = self.stages.get(stage, 0.0) + seconds
        dist.barrier()
        seconds = (time.perf_counter() - start) / steps
        if measured:
            self.seconds.append(seconds)
            self.bytes += bytes_out() - before
            self.steps += steps
        return seconds

    def _before_step(self) -> None:
        """What a sync that watches this optimizer does there."""
        if self.sync is not None:
            self.sync.before_optimizer_step()

    def density(self) -> float | None:
        if self.name in ("noop", "dense", "fp16"):
            return 1.0
        if self.sync is None:
            return None
        return self.sent / self.steps / sum(unit.n for unit in self.sync.pipeline.units)


def _same_everywhere(value: float) -> float:
    tensor = torch.tensor([value], dtype=torch.float64)
    dist.broadcast(tensor, 0)
    return float(tensor)


def measure(config: dict[str, Any]) -> list[dict[str, Any]]:
    """Warm up, take turns, return one row a sync (the same on every rank but for the rank's own bytes)."""
    torch.manual_seed(0)
    model = build(config["workload"], config["params"])
    one_bucket = (
        Arena(copy.deepcopy(model), bucket_cap_mb("powersgd")) if "powersgd" in config["syncs"] else None
    )
    default = Arena(model, None)
    torch.manual_seed(1 + dist.get_rank())
    batch = batch_for(config["workload"])
    contestants = [
        Contestant(name, one_bucket if name == "powersgd" and one_bucket else default, config["density"])
        for name in config["syncs"]
    ]
    turn_steps = {}
    for contestant in contestants:
        seconds = [contestant.run(batch, 1, measured=False) for _ in range(contestant.warm_steps)]
        tell(f"warm-up: {contestant.name} {1e3 * seconds[-1]:.0f} ms a step")
        turn_steps[contestant.name] = int(
            min(max(_TURN_SECONDS // _same_everywhere(seconds[-1]), 1), _MOST_STEPS)
        )
    start = time.perf_counter()
    for turn in range(config["rounds"]):
        for contestant in contestants:
            contestant.run(batch, turn_steps[contestant.name], measured=True)
        left = (time.perf_counter() - start) / (turn + 1) * (config["rounds"] - turn - 1)
        tell(f"round {turn + 1} of {config['rounds']}, about {left:.0f} s left")
    return [_row(contestant, contestants) for contestant in contestants]


def _row(contestant: Contestant, contestants: list[Contestant]) -> dict[str, Any]:
    by_name = {each.name: each.seconds for each in contestants}
    mine = contestant.seconds

    def ratio(top: list[float], bottom: list[float]) -> float:
        return round(statistics.median(a / b for a, b in zip(top, bottom, strict=True)), 3)

    return {
        "sync": contestant.name,
        "step_ms": round(1e3 * statistics.median(mine), 1),
        "vs_noop": ratio(mine, by_name["noop"]),
        "vs_dense": ratio(by_name["dense"], mine),
        "bytes_sent": int(most_anywhere(contestant.bytes / contestant.steps)),
        "density": contestant.density(),
        "step_ms_all": [round(1e3 * seconds, 1) for seconds in mine],
        "stage_ms": {name: round(1e3 * s / contestant.steps, 1) for name, s in contestant.stages.items()},
    }


if __name__ == "__main__":
    run_rank(measure)
