"""One rank of `gradsieve bench hsdp`: three models of the same size, round robin, in the same processes.

A turn is a few training steps between two barriers. Turns go round, there and back, so that a noisy machine
is noisy for all alike; ratios are formed within a round.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from gradsieve import attach, host_mesh
from gradsieve_tools.bench.common.in_lab import (
    Rows,
    bytes_out,
    most_anywhere,
    ratio,
    run_rank,
    same_everywhere,
    tell,
)
from gradsieve_tools.bench.common.workloads import batch_for, build

COLUMNS = ["sync", "step_ms", "vs_noop", "vs_noop_half", "vs_dense", "vs_dense_half", "bytes_sent", "bits"]
COLUMNS += ["replicas_equal_for"]

SYNCS = ("noop", "dense", "auto")
_WARM = {"noop": 3, "dense": 3, "auto": 60}  # steps before the clock runs: a budget is chosen
_TURN_SECONDS, _MOST_STEPS = 2.0, 50
_LOOK = 20  # steps between two comparisons of the replicas' bits


class Contestant:
    """A model that is sharded inside hosts; between them nothing, all gradients, or our exchange."""

    def __init__(self, name: str, config: dict[str, Any], mesh: DeviceMesh) -> None:
        self.name = name
        self.seconds: list[float] = []
        self.bytes, self.steps = 0, 0
        torch.manual_seed(0)
        model = build("mlp", config["params"])
        self.n = sum(parameter.numel() for parameter in model.parameters())
        over = mesh if name == "dense" else mesh["shard"]
        for layer in model.children():
            fully_shard(layer, mesh=over, reshard_after_forward=False)
        fully_shard(model, mesh=over, reshard_after_forward=False)
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        self.sync = (
            attach(self.model, self.optimizer, replicate=mesh["replicate"]) if name == "auto" else None
        )

    def run(self, batch: tuple[Tensor, Tensor], steps: int, measured: bool = False) -> float:
        """Seconds a step, between two barriers."""
        dist.barrier()
        before, start = bytes_out(), time.perf_counter()
        for _ in range(steps):
            self.optimizer.zero_grad()
            torch.autograd.backward(nn.functional.mse_loss(self.model(batch[0]), batch[1]))
            self.optimizer.step()
        dist.barrier()
        seconds = (time.perf_counter() - start) / steps
        if measured:
            self.seconds.append(seconds)
            self.bytes += bytes_out() - before
            self.steps += steps
        return seconds


def measure(config: dict[str, Any]) -> Rows:
    mesh = host_mesh("cpu")
    contestants = {name: Contestant(name, config, mesh) for name in SYNCS}
    torch.manual_seed(1 + dist.get_rank())
    inputs, target = batch_for("mlp", config["params"])
    batch = inputs[: config["batch"]], target[: config["batch"]]
    turns = {}
    for name, each in contestants.items():
        each.run(batch, _WARM[name] - 1)
        seconds = same_everywhere(each.run(batch, 1))
        tell(f"warm-up: {name} {1e3 * seconds:.0f} ms a step")
        turns[name] = int(min(max(_TURN_SECONDS // seconds, 1), _MOST_STEPS))
    start = time.perf_counter()
    for turn in range(config["rounds"]):
        for name in SYNCS if turn % 2 == 0 else reversed(SYNCS):
            contestants[name].run(batch, turns[name], measured=True)
        left = (time.perf_counter() - start) / (turn + 1) * (config["rounds"] - turn - 1)
        tell(f"round {turn + 1} of {config['rounds']}, about {left:.0f} s left")
    rows = [_row(each, contestants) for each in contestants.values()]
    rows[-1]["replicas_equal_for"] = _compared(contestants["auto"], batch, config["steps"])
    return rows


def _compared(ours: Contestant, batch: tuple[Tensor, Tensor], steps: int) -> int:
    """Steps in all, the bits of hosts compared now and then from here on; raises where they differ."""
    sync = ours.sync
    assert sync is not None
    sync.verify()
    while sync.pipeline.step < steps:
        ours.run(batch, min(_LOOK, steps - sync.pipeline.step))
        sync.verify()
        tell(f"hosts have the same bits after {sync.pipeline.step} steps")
    sync.abandon()
    return sync.pipeline.step


def _row(contestant: Contestant, every: dict[str, Contestant]) -> dict[str, Any]:
    mine = contestant.seconds
    sent = most_anywhere(contestant.bytes / contestant.steps)
    return {
        "sync": contestant.name,
        "step_ms": round(1e3 * statistics.median(mine), 1),
        **ratio("vs_noop", mine, every["noop"].seconds),
        **ratio("vs_dense", every["dense"].seconds, mine),
        "bytes_sent": int(sent),
        "bits": round(8 * sent / contestant.n, 3),
        "step_ms_all": [round(1e3 * seconds, 1) for seconds in mine],
    }


if __name__ == "__main__":
    run_rank(measure)
