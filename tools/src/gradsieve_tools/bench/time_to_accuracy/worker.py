"""One rank of `gradsieve bench time-to-accuracy`: learns with one sync after the other.

The clock and the interface's counter run only while all ranks train, between two barriers; not while they
evaluate, each on its part of the test examples.
"""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradsieve import GradientSync, record
from gradsieve.recording import Recorder
from gradsieve_tools.bench.common.in_lab import bytes_out, most_anywhere, run_rank, tell
from gradsieve_tools.bench.common.race import Curve, Run
from gradsieve_tools.bench.common.syncs import attached
from gradsieve_tools.bench.common.virtual import own_batches
from gradsieve_tools.bench.rivals.names import bucket_cap_mb, buffers_stay, torch_hook
from gradsieve_tools.bench.time_to_accuracy.measure import Plan

# With each sync before the clock starts, or the first to do so would pay for what a process does only once:
# dense for its start, one of ours for compiling kernels
_FIRST_STEPS = 3


class Learner:
    """A fresh model that learns with one sync, and what that took so far."""

    def __init__(self, name: str, plan: Plan, seed: int) -> None:
        self.name, self.plan, self.seed = name, plan, seed
        rank, world = dist.get_rank(), dist.get_world_size()
        training = plan.recipe(seed, plan.steps, plan.sized.batch * world)
        self.training = replace(training, test=training.test.take(slice(rank, None, world)))
        self.batches = own_batches(training, rank, world, mixed=True, seed=seed)
        # What the models have in buffers never changes: none of it need travel.
        self.ddp = DistributedDataParallel(
            training.model,
            bucket_cap_mb=bucket_cap_mb(name),
            gradient_as_bucket_view=True,
            **buffers_stay(),
        )
        self.seconds, self.bytes = 0.0, 0
        self.sync: GradientSync | None = None
        self.recorder: Recorder | None = None
        torchs = torch_hook(name)
        if torchs is None:
            self.sync = attached(name, self.ddp, training.optimizer, plan.density)
            if plan.record is not None:
                stem = f"{plan.task}_{name.replace(':', '~')}_d{plan.density:g}_P{world}_s{seed}"
                self.recorder = record(self.sync, Path(plan.record) / stem)
        else:
            self.ddp.register_comm_hook(*torchs)

    def train(self, steps: int) -> None:
        training = self.training
        dist.barrier()
        bytes_before, start = bytes_out(), time.perf_counter()
        for _ in range(steps):
            batch = training.train.take(next(self.batches))
            training.optimizer.zero_grad()
            loss = training.loss(self.ddp(*batch.inputs), batch.target)
            torch.autograd.backward(loss)
            training.optimizer.step()
            if self.recorder is not None:
                self.recorder.note_loss(loss.item())
            training.schedule.step()
        dist.barrier()
        self.seconds += time.perf_counter() - start
        self.bytes += bytes_out() - bytes_before

    def value(self) -> float:
        """The metric on all test examples, the same number on every rank: each evaluates its own model on its
        part.

        No flush comes before it: it would cost bytes that a training need not spend. Nor the shared model,
        which lacks the residual: a training that ended here would be flushed. So the model stays in training
        mode, in which no sync shows another.
        """
        if self.sync is not None:
            self.sync.replica.models.show_own()
        value, count = self.training.evaluate_as_is(), len(self.training.test)
        if self.sync is not None:
            self.sync.replica.models.show_shared()
        total = torch.tensor([value * count, count], dtype=torch.float64, device="cpu")
        dist.all_reduce(total)
        return float(total[0] / total[1])

    def close(self) -> None:
        if self.sync is not None:
            self.sync.abandon()


def learn(learner: Learner, target: float | None) -> Run:
    """Train to the target, or to the end of the budget; dense sets the target."""
    curve, taken = Curve(learner.training.metric), 0
    evaluations = learner.plan.evaluations(learner.name)
    for step in evaluations:
        learner.train(step - taken)
        curve.add(step, learner.seconds, learner.value())
        reached = target is not None and curve.crossing(target) is not None
        aim = "" if target is None else f", target {target:.4f}"
        tell(
            f"{learner.name}, seed {learner.seed}: step {step}, {1e3 * learner.seconds / step:.0f} ms each, "
            f"{curve.metric} {curve.values[-1]:.4f}{aim}",
        )
        taken = step
        if reached:
            break
    final = curve.smoothed[-1] if target is None else target
    sent = int(most_anywhere(learner.bytes))
    return Run(learner.name, learner.seed, final, curve, sent, learner.training.n)


def measure(config: dict[str, Any]) -> list[dict[str, Any]]:
    """Train every sync with every seed, and return the runs, the same on every rank."""
    plan = Plan(**config)
    for sync in plan.syncs:
        with closing(Learner(sync, replace(plan, record=None), 0)) as first:
            first.train(_FIRST_STEPS)
            first.value()
    runs = []
    for seed in range(plan.seeds):
        target = None
        for sync in plan.syncs:
            with closing(Learner(sync, plan, seed)) as learner:
                runs.append(learn(learner, target))
            target = runs[-1].target
    return [asdict(run) for run in runs]


if __name__ == "__main__":
    run_rank(measure)
