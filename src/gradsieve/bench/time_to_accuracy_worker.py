"""One rank of `gradsieve bench time-to-accuracy`: learns with one sync after the other.

The clock and the interface's counter run only while all ranks train, between two barriers; not while they
evaluate, each on its part of the test images.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import gradsieve
from gradsieve.bench.in_lab import bytes_out, most_anywhere, run_rank, tell
from gradsieve.bench.models import read_images, scaled
from gradsieve.bench.rivals import bucket_cap_mb, torch_hook
from gradsieve.bench.time_to_accuracy import CLASSES, PIXELS, Curve, Images, Plan, Run
from gradsieve.integrations.gradient_sync import GradientSync

_FIRST_STEPS = 3
"""Before the first clock starts, or dense would pay for what a process does only once."""
_LINE_SECONDS = 5.0


def batches(training: Images, batch: int, seed: int, rank: int, world: int) -> Iterator[Images]:
    """This rank's part of every global batch, epoch after epoch, each in a new order."""
    pixels, labels = training
    random = torch.Generator().manual_seed(seed)  # one order for all ranks: their parts are disjoint
    used = len(labels) // (world * batch) * (world * batch)
    while True:
        order = torch.randperm(len(labels), dtype=torch.int64, device=random.device, generator=random)
        for mine in order[:used].view(-1, world, batch)[:, rank]:
            yield pixels[mine], labels[mine]


class Learner:
    """A fresh model that learns with one sync, and what that took so far."""

    def __init__(self, name: str, plan: Plan, seed: int, training: Images) -> None:
        self.name, self.plan, self.seed = name, plan, seed
        torch.manual_seed(seed)
        first, last = nn.Linear(PIXELS, plan.width), nn.Linear(plan.width, CLASSES)
        self.model = nn.Sequential(first, nn.ReLU(), nn.Linear(plan.width, plan.width), nn.ReLU(), last)
        self.ddp = DistributedDataParallel(
            self.model, bucket_cap_mb=bucket_cap_mb(name), gradient_as_bucket_view=True
        )
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=plan.learning_rate, momentum=plan.momentum)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min(1.0, (step + 1) / plan.warm_up)
        )
        self.batches = batches(training, plan.batch, seed, dist.get_rank(), dist.get_world_size())
        self.seconds, self.bytes = 0.0, 0
        self.sync: GradientSync | None = None
        torchs = torch_hook(name)
        if torchs is None:
            self.sync = gradsieve.attach(self.ddp, self.optimizer, scheme=name, density=plan.density)
        else:
            self.ddp.register_comm_hook(*torchs)

    def train(self, steps: int) -> None:
        dist.barrier()
        bytes_before, start = bytes_out(), time.perf_counter()
        for _ in range(steps):
            pixels, labels = next(self.batches)
            self.optimizer.zero_grad()
            torch.autograd.backward(cross_entropy(self.ddp(scaled(pixels)), labels))
            self.optimizer.step()
            self.schedule.step()
        dist.barrier()
        self.seconds += time.perf_counter() - start
        self.bytes += bytes_out() - bytes_before

    def accuracy(self, test: Images) -> float:
        """On all test images, the same number on every rank: each judges its own model on its part.

        No flush comes before it: it would cost bytes that a training need not spend. Nor the shared model,
        which lacks what waits: a training that ended here would be flushed.
        """
        pixels, labels = (whole[dist.get_rank() :: dist.get_world_size()] for whole in test)
        models = None if self.sync is None else self.sync.models
        if models is not None:
            models.show_own()
        with torch.no_grad():
            right = (self.model(scaled(pixels)).argmax(1) == labels).sum()
        if models is not None:
            models.show_shared()
        dist.all_reduce(right)
        return int(right) / len(test[1])

    def close(self) -> None:
        if self.sync is not None:
            self.sync.abandon()


class Progress:
    """Lines for a person: how far the learning with one sync is, and how long that can still take.

    Not how long all will take: from dense on a slow link one would conclude hours for those that are fast.
    """

    def __init__(self, most_steps: int) -> None:
        self.most_steps = most_steps
        self.start = self.told = time.monotonic()

    def note(self, step: int, reached: bool, text: str) -> None:
        now = time.monotonic()
        left = 0.0 if reached else (self.most_steps - step) * (now - self.start) / step
        if now - self.told >= _LINE_SECONDS or not left:
            self.told = now
            tell(f"{text}; at most about {left:.0f} s left with this sync")


def learn(learner: Learner, target: float | None, test: Images) -> Run:
    """Until the target, or as far as this sync may go; dense, which sets the target, has none."""
    curve, taken = Curve(), 0
    evaluations = learner.plan.evaluations(learner.name)
    progress = Progress(evaluations[-1])
    for step in evaluations:
        learner.train(step - taken)
        curve.add(step, learner.seconds, learner.accuracy(test))
        reached = target is not None and curve.crossing(target) is not None
        aim = "" if target is None else f", target {target:.4f}"
        progress.note(
            step,
            reached,
            f"{learner.name}, seed {learner.seed}: step {step}, {1e3 * learner.seconds / step:.0f} ms each, "
            f"accuracy {curve.accuracy[-1]:.4f}{aim}",
        )
        taken = step
        if reached:
            break
    final = curve.smoothed[-1] if target is None else target
    return Run(learner.name, learner.seed, final, curve, int(most_anywhere(learner.bytes)))


def measure(config: dict[str, Any]) -> list[dict[str, Any]]:
    """Every sync with every seed; the runs, the same on every rank."""
    plan = Plan(**config)
    training, test = read_images("train"), read_images("t10k")
    with closing(Learner("dense", plan, 0, training)) as first:
        first.train(_FIRST_STEPS)
        first.accuracy(test)
    runs = []
    for seed in range(plan.seeds):
        target = None
        for sync in plan.syncs:
            with closing(Learner(sync, plan, seed, training)) as learner:
                runs.append(learn(learner, target, test))
            target = runs[-1].target
    return [asdict(run) for run in runs]


if __name__ == "__main__":
    run_rank(measure)
