"""A task trained by a rival on virtual ranks: models, shards, batches and evaluations are `virtual.py`'s."""

from __future__ import annotations

from collections.abc import Callable

import torch

from gradsieve.schemes import Ctx
from gradsieve.testing import Meter, lockstep
from gradsieve_tools.bench.common.virtual import Course, looks, own_batches
from gradsieve_tools.bench.rivals.ablated import Ablated
from gradsieve_tools.bench.rivals.base import Rival, RivalRun
from gradsieve_tools.bench.rivals.cser import Cser
from gradsieve_tools.bench.rivals.demo import DeMo
from gradsieve_tools.bench.rivals.local import DiLoCo, LocalSgd, OneBit, OneShot, Sparta
from gradsieve_tools.bench.rivals.one_bit_adam import OneBitAdam, ZeroOneAdam
from gradsieve_tools.bench.rivals.sparseloco import SparseLoCo
from gradsieve_tools.bench.rivals.streaming import MuLoCo, Streaming
from gradsieve_tools.bench.tasks import training as tasks
from gradsieve_tools.specs import with_settings

RIVALS: dict[str, type[Rival]] = {
    "local-sgd": LocalSgd,
    "diloco": DiLoCo,
    "streaming": Streaming,
    "muloco": MuLoCo,
    "one-shot": OneShot,
    "cser": Cser,
    "sparseloco": SparseLoCo,
    "demo": DeMo,
    "sparta": Sparta,
    "one-bit": OneBit,
    "one-bit-adam": OneBitAdam,
    "zero-one-adam": ZeroOneAdam,
    "ablated": Ablated,
}


def parse(text: str) -> Rival:
    """A rival as text: `one-shot`, `diloco:every=32+values=int4`."""
    name, colon, settings = text.partition(":")
    rival = RIVALS[name]()
    return with_settings(rival, name, settings) if colon else rival


class Member:
    def __init__(self, run: RivalRun, rival: Rival, rank: int) -> None:
        self.training = tasks.build(run.task, run.seed, run.steps, run.batch, run.rate)
        self.part = rival.begin(self.training, Ctx(rank, run.world, 0))
        self._batches = own_batches(self.training, rank, run.world, run.mixed, run.seed)

    def backward(self) -> None:
        training = self.training
        batch = training.train.take(next(self._batches))
        training.optimizer.zero_grad()
        torch.autograd.backward(training.loss(training.model(*batch.inputs), batch.target))


def train(run: RivalRun, rival: Rival, after_step: Callable[[], None] = lambda: None) -> Course:
    """The metric is that of rank 0's model; the last one after `finish`."""
    members = [Member(run, rival, rank) for rank in range(run.world)]
    meters = [Meter(rank, run.world) for rank in range(run.world)]
    course = Course(density=1.0, parameters=members[0].training.n)
    evaluated = looks(run.steps)
    for step in range(1, run.steps + 1):
        for member in members:
            member.backward()
        lockstep.run([member.part.step(step) for member in members], meters)
        if step == run.steps:
            lockstep.run([member.part.finish() for member in members], meters)
        if step in evaluated:
            course.steps.append(step)
            course.values.append(members[0].training.evaluate())
        after_step()
    course.bytes_sent = max(meter.moved for meter in meters) / run.steps
    return course
