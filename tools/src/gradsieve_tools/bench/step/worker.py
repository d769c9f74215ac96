"""One rank of `gradsieve bench step`: all syncs run round robin on the same model, in the same processes.

A turn is a few consecutive training steps between two barriers. Turns go round, there and back, so that a
noisy machine is noisy for all syncs alike; ratios are formed within a round. Two models stand ready because
torch's PowerSGD hook needs one large bucket on gloo (it mismatches collectives with more); the others use
DDP's default buckets.

Our syncs remember the model as they left it: what others' turns did to the parameters would look like steps
of this rank's own, and be sent. So each of ours has its own optimizer, and finds its own parameters when its
turn begins.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket
from torch.nn.parallel import DistributedDataParallel

from gradsieve.hooks import install_comm_hook
from gradsieve.parallel.ddp import DdpSync
from gradsieve.pipeline.frame import Span
from gradsieve.recording import Recorder
from gradsieve_tools.bench.common import idle
from gradsieve_tools.bench.common.idle import IDLE, Device, Drift, Idle, emulate
from gradsieve_tools.bench.common.in_lab import (
    bytes_out,
    most_anywhere,
    ratio,
    run_rank,
    same_everywhere,
    tell,
)
from gradsieve_tools.bench.common.syncs import attached, steps_late
from gradsieve_tools.bench.common.workloads import batch_for, build
from gradsieve_tools.bench.rivals.names import bucket_cap_mb, torch_hook
from gradsieve_tools.bench.step.timeline import Event, events_of, from_all_ranks, hidden

# Exchanges before the clock runs: a budget is found, thresholds and partitions converge, dense is tried where
# it could be faster, DDP rebuilds its buckets
_WARM_SEARCH, _WARM_STATEFUL, _WARM = 128, 16, 2
# Steps at most for a budget, and between two looks whether it was found
_LONGEST_SEARCH, _SEARCH_TURN = 1200, 40
_TURN_SECONDS, _MOST_STEPS = 1.5, 50  # shorter turns would measure the scheduler


class Laps:
    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._since = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.spans.append(Span(name, -1, self._since, now))
        self._since = now


class Arena:
    """A DDP model whose communication hook can be changed between steps."""

    def __init__(self, model: nn.Module, bucket_cap_mb: float | None) -> None:
        self.device = model.device if isinstance(model, Idle) else None
        self.ddp = DistributedDataParallel(model, bucket_cap_mb=bucket_cap_mb, gradient_as_bucket_view=True)
        self.parameters = list(self.ddp.parameters())
        self.optimizer = self.new_optimizer()
        self.comm_hook = install_comm_hook(self.ddp)  # leads to the current sync

    def new_optimizer(self) -> torch.optim.Optimizer:
        if self.device is not None:
            return Drift(self.parameters, dist.get_rank())
        return torch.optim.SGD(self.parameters, lr=0.01, momentum=0.9)


class ClockedRecorder(Recorder):
    """Adds up the processor time it takes: a share of a step that is lost among the noise of whole steps."""

    seconds, steps = 0.0, 0

    def after_step(self) -> None:
        start = time.thread_time()
        super().after_step()
        self.seconds += time.thread_time() - start
        self.steps += 1


class Contestant:
    def __init__(
        self, name: str, arena: Arena, density: float, record: Path | None = None, spins: bool = False
    ) -> None:
        self.name, self.arena, self.optimizer = name, arena, arena.optimizer
        self.label = name if record is None else f"{name}, recorded"
        self.seconds: list[float] = []
        self.bytes = 0
        self.worked = 0.0
        self.steps = 0
        self.sent = 0
        self.stages: dict[str, float] = {}
        # Seconds of exchange that forward and backward hid, and all of them
        self.behind = self.exchange = 0.0
        self.last_step: list[Event] = []
        self.sync: DdpSync | None = None
        self.recorder: ClockedRecorder | None = None
        self.own: list[Tensor] = []  # the parameters as one of our syncs left them
        self._laps = Laps()
        self.hook = self._hook(density, record, spins)

    def _hook(self, density: float, record: Path | None, spins: bool) -> Callable[[Any], Any] | None:
        """Return what a contestant without a sync does with DDP's buckets."""
        if self.name == "noop":
            return _keep_own_gradient
        torchs = torch_hook(self.name)
        if torchs is not None:
            state, hook = torchs
            return partial(hook, state)
        self.optimizer = self.arena.new_optimizer()
        self.own = [parameter.detach().clone() for parameter in self.arena.parameters]
        self.sync = attached(self.name, self.arena.ddp, self.optimizer, density)
        if self.arena.device is not None:
            emulate(self.sync, self.arena.device, spins)
        if record is not None:
            self.recorder = ClockedRecorder(self.sync.pipeline, record)
        self.sync.attached.leave()  # until its turn comes
        self.optimizer.register_step_pre_hook(lambda *_: self._laps.lap("sync"))  # after the sync's own
        return None

    @property
    def every(self) -> int:
        """Steps to an exchange."""
        return 1 if self.sync is None else self.sync.replica.settings.every

    @property
    def warm_steps(self) -> int:
        """Return whole periods less one step, so that no exchange is pending in the turns of others."""
        least = _WARM if self.name in ("noop", "dense", "fp16") else _WARM_STATEFUL
        return least if self.every == 1 else self.every * (1 + least // self.every) - 1

    def warm_up(self, batch: tuple[Tensor, Tensor]) -> float:
        """Train until a budget is found, and return the seconds of the last step."""
        if self.name != "auto":
            self.run(batch, self.warm_steps - 1, measured=False)
            return self.run(batch, 1, measured=False)
        assert self.sync is not None
        pipeline, steps = self.sync.pipeline, 0
        while pipeline.step < _WARM_SEARCH and steps < _LONGEST_SEARCH:
            self.run(batch, _SEARCH_TURN, measured=False)
            steps += _SEARCH_TURN
        while pipeline.since != self.every - 1:
            self.run(batch, 1, measured=False)
        return self.run(batch, self.every, measured=False)

    def turn_steps(self, seconds: float, longest: int) -> int:
        """Return the steps of a turn, in whole periods of all syncs, so that barriers weigh alike."""
        steps = int(min(max(_TURN_SECONDS // seconds, 1), _MOST_STEPS))
        period = longest if self.name == "noop" else self.every
        return period * -(-steps // period)

    def run(self, batch: tuple[Tensor, Tensor], steps: int, measured: bool) -> float:
        """`steps` training steps between two barriers; seconds a step."""
        _copy(self.own, self.arena.parameters)
        if self.sync is None:
            self.arena.comm_hook.hand_over = self.hook
        else:
            self.sync.attached.enter()
        seen: list[tuple[list[Span], Any]] = []
        spans: list[Span] = []
        dist.barrier()
        before, start, worked = bytes_out(), time.perf_counter(), time.process_time()
        for _ in range(steps):
            last = None if self.sync is None else self.sync.pipeline.stats
            self._step(*batch)
            spans += self._laps.spans
            if self.sync is not None and self.sync.pipeline.stats is not last:
                seen.append((spans, self.sync.pipeline.stats))
                spans = []
        dist.barrier()
        seconds = (time.perf_counter() - start) / steps
        if measured:
            self.seconds.append(seconds)
            self.bytes += bytes_out() - before
            self.worked += time.process_time() - worked
            self.steps += steps
            for laps, stats in seen:
                self._note(laps, stats)
        if self.sync is not None:
            self.sync.attached.leave()
        _copy(self.arena.parameters, self.own)
        return seconds

    def _step(self, inputs: Tensor, target: Tensor) -> None:
        laps = self._laps = Laps()
        self.optimizer.zero_grad()
        loss = nn.functional.mse_loss(self.arena.ddp(inputs), target)
        laps.lap("forward")
        torch.autograd.backward(loss)
        laps.lap("backward")
        self.optimizer.step()  # after the sync has finished: it watches the optimizer
        if self.arena.device is not None:
            self.arena.device.wait()  # as a loop that reads the loss does
        laps.lap("optimizer")

    def _note(self, laps: Sequence[Span], stats: Any) -> None:
        """An exchange, and what was done since the one before."""
        self.sent += stats.sent
        for stage, seconds in stats.seconds.items():
            self.stages[stage] = self.stages.get(stage, 0.0) + seconds
        self.last_step = events_of(laps, stats.timeline.spans)
        behind, exchange = hidden(self.last_step)
        self.behind += behind
        self.exchange += exchange

    def density(self) -> float | None:
        if self.name in ("noop", "dense", "fp16"):
            return 1.0
        if self.sync is None:
            return None
        return self.sent / self.steps / sum(unit.n for unit in self.sync.pipeline.units)

    def close(self) -> None:
        if self.sync is not None:
            self.sync.abandon()


def _keep_own_gradient(bucket: GradBucket) -> torch.futures.Future[Tensor]:
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


@torch.no_grad()
def _copy(source: Sequence[Tensor], target: Sequence[Tensor]) -> None:
    for one, other in zip(source, target, strict=False):
        other.copy_(one)


def _sums(*values: float) -> list[float]:
    tensor = torch.tensor(values, dtype=torch.float64, device="cpu")
    dist.all_reduce(tensor)
    return tensor.tolist()


def measure(config: dict[str, Any]) -> list[dict[str, Any]]:
    """Warm up, take turns, return one row a sync (the same on every rank but for the rank's own bytes)."""
    torch.manual_seed(0)
    is_idle = config["workload"] == IDLE
    model = (
        Idle(config["params"], Device(config["compute"], config["ahead"]))
        if is_idle
        else build(config["workload"], config["params"])
    )
    one_bucket = (
        Arena(copy.deepcopy(model), bucket_cap_mb("powersgd")) if "powersgd" in config["syncs"] else None
    )
    default = Arena(model, None)
    torch.manual_seed(1 + dist.get_rank())
    batch = idle.batch() if is_idle else batch_for(config["workload"], config["params"])
    contestants = [
        Contestant(
            name,
            one_bucket if name == "powersgd" and one_bucket else default,
            config["density"],
            spins=config.get("spins", False),
        )
        for name in config["syncs"]
    ]
    if config.get("record"):
        folder = Path(config["record"])
        ours = [each.name for each in contestants if each.sync is not None]
        contestants += [
            Contestant(name, default, config["density"], folder / _file_name(name, config)) for name in ours
        ]
    warm = {}
    for contestant in contestants:
        warm[contestant] = same_everywhere(contestant.warm_up(batch))
        tell(f"warm-up: {contestant.label} {1e3 * warm[contestant]:.0f} ms a step")
    longest = max(contestant.every for contestant in contestants)
    turn_steps = {each.label: each.turn_steps(seconds, longest) for each, seconds in warm.items()}
    start = time.perf_counter()
    for turn in range(config["rounds"]):
        # There and back: the sync after dense would always pay for what dense left in caches and links.
        for contestant in contestants if turn % 2 == 0 else reversed(contestants):
            contestant.run(batch, turn_steps[contestant.label], measured=True)
        left = (time.perf_counter() - start) / (turn + 1) * (config["rounds"] - turn - 1)
        tell(f"round {turn + 1} of {config['rounds']}, about {left:.0f} s left")
    rows = [_row(contestant, contestants) for contestant in contestants]
    for contestant in contestants:
        contestant.close()
    return rows


def _file_name(sync: str, config: dict[str, Any]) -> str:
    parts = [config["workload"], sync.replace(":", "~"), f"d{config['density']:g}", f"P{config['hosts']}"]
    return "_".join([*parts, config["rate"] or "unshaped"])


def _row(contestant: Contestant, contestants: list[Contestant]) -> dict[str, Any]:
    by_name = {each.label: each.seconds for each in contestants}
    mine = contestant.seconds
    bytes_sent = most_anywhere(contestant.bytes / contestant.steps)
    row = {
        "sync": contestant.label,
        "late": contestant.every if contestant.name == "auto" else steps_late(contestant.name),
        "step_ms": round(1e3 * statistics.median(mine), 1),
        **ratio("vs_noop", mine, by_name["noop"]),
        **ratio("vs_dense", by_name["dense"], mine),
        "bytes_sent": int(bytes_sent),
        "bits": round(8 * bytes_sent / sum(each.numel() for each in contestant.arena.parameters), 3),
        "density": contestant.density(),
        "cpu_ms": round(1e3 * contestant.worked / contestant.steps, 1),
        "step_ms_all": [round(1e3 * seconds, 1) for seconds in mine],
        "stage_ms": {name: round(1e3 * s / contestant.steps, 1) for name, s in contestant.stages.items()},
    }
    if contestant.recorder is not None:
        taken = contestant.recorder.seconds / contestant.recorder.steps
        row["recorder_ms"] = round(1e3 * most_anywhere(taken), 3)
    if contestant.sync is not None:
        budget = contestant.sync.pipeline.budget
        row["budget"] = None if budget is None else [round(budget.bits, 3), budget.every]
        behind, exchange = _sums(contestant.behind, contestant.exchange)
        # Where gradients are exchanged, DDP waits for them inside of backward.
        is_sent = exchange and contestant.sync.pipeline.exchanges_steps
        row["hidden"] = round(behind / exchange, 3) if is_sent else None
        row["timeline"] = from_all_ranks(contestant.last_step)
    return row


if __name__ == "__main__":
    run_rank(measure)
