"""A task trained by P virtual ranks in this process: the pipeline, the schemes and the laws of a real run.

Every rank has its own model, optimizer and shard, as in a real run; their exchanges advance in lockstep.
Batch norm's running statistics are rank 0's, as DistributedDataParallel has it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradsieve.recording import Recorder
from gradsieve.schemes import Scheme, Sparse
from gradsieve.testing import Budget, Exchange, Pending, Pipeline, cost, lockstep, make_pipeline
from gradsieve_tools.bench.common.fidelity import captured, differs_from_top_k
from gradsieve_tools.bench.tasks import training as tasks

EVALUATIONS = 20  # most evaluations of a training
# Steps between two looks at fidelity and at the residual: they need all ranks' vectors at once
LOOK_EVERY = 50
JUDGED_EVERY = 50  # steps between two evaluations, at least: one takes as long as tens of steps
RECORD_EVERY = 10  # steps between two lines of a record with norms


@dataclass(frozen=True, slots=True)
class Run:
    task: str
    scheme: Scheme[Any]
    exchange: Exchange
    seed: int
    world: int = 4
    steps: int | None = None
    mixed: bool = True
    bits: float | None = None  # A budget a parameter and step, the flush included, which stripes spend
    batch: int | None = None  # examples in a step, over all ranks, if not as many as the task has
    record: Path | None = None  # folder for records of every rank
    rate: float = 1.0  # times the task's learning rate


@dataclass(slots=True)
class Course:
    steps: list[int] = field(default_factory=list)
    # The metric on rank 0's model; the last one after the flush
    values: list[float] = field(default_factory=list)
    fidelity: list[float] = field(default_factory=list)
    # Norm of the residual over that of what was sent, on all ranks
    waiting: list[float] = field(default_factory=list)
    # Mean of the steps since an element was last sent, over those sent
    ages: list[float] = field(default_factory=list)
    # Largest difference of an element between two ranks' own models
    apart: list[float] = field(default_factory=list)
    bytes_sent: float = 0.0  # bytes of the busiest rank in a step, the flush included
    density: float = 0.0
    parameters: int = 0
    unflushed: float | None = None  # the metric of the shared model before the flush, for steps
    unflushed_bytes: float | None = None  # bytes of the busiest rank in a step, without the flush


class Member:
    def __init__(self, run: Run, rank: int) -> None:
        self.training = tasks.build(run.task, run.seed, run.steps, run.batch, run.rate)
        parameters = dict(self.training.model.named_parameters())
        optimizer = self.training.optimizer
        self.pipeline = make_pipeline(parameters, [optimizer], run.scheme, run.exchange, rank, run.world)
        if run.bits is not None:
            self.pipeline.budget = budget(run.bits, self.training, run.world)
        self.batches = own_batches(self.training, rank, run.world, run.mixed, run.seed)
        self.recorder = None if run.record is None else Recorder(self.pipeline, run.record, RECORD_EVERY)
        self.loss = math.nan

    def backward(self) -> None:
        training = self.training
        batch = training.train.take(next(self.batches))
        training.optimizer.zero_grad()
        loss = training.loss(training.model(*batch.inputs), batch.target)
        torch.autograd.backward(loss)
        self.loss = loss.item()

    def step(self) -> None:
        optimizer = self.training.optimizer
        self.pipeline.before_update(optimizer, self.pipeline.parameters.keys())
        optimizer.step()
        self.pipeline.after_update()
        self.training.schedule.step()
        if self.recorder is not None:
            self.recorder.note_loss(self.loss)


def budget(bits: float, training: tasks.Training, world: int) -> Budget:
    """Return what is left for each step of so many bits once the flush at the end is paid for."""
    return Budget(bits - cost("exact", world) / training.steps)


def own_batches(training: tasks.Training, rank: int, world: int, mixed: bool, seed: int) -> Iterator[Tensor]:
    """The examples of a rank's steps: the same whatever exchanges its gradients."""
    shard = tasks.shards(training, world, mixed)[rank]
    return tasks.batches(shard, training.batch // world, 1000 * seed + rank)


def looks(steps: int) -> set[int]:
    """The steps after which the model is evaluated, evenly spread, the last one among them."""
    count = min(EVALUATIONS, max(1, steps // JUDGED_EVERY))
    return {math.ceil(i * steps / count) for i in range(1, count + 1)}


def train(run: Run, after_step: Callable[[], None] = lambda: None) -> Course:
    members = [Member(run, rank) for rank in range(run.world)]
    watch = Watch(members)
    steps = members[0].training.steps
    evaluated = looks(steps) - {steps}
    under_way: list[Pending] = []
    for step in range(1, steps + 1):
        for member in members:
            member.backward()
        last = step == steps
        begun = [member.pipeline.begins_exchange() for member in members]
        due = all(begun)
        if due:
            under_way = begin(members, everything=last and not members[0].pipeline.exchanges_steps)
        if under_way and members[0].pipeline.is_exchange_due:
            end(members, under_way)
            under_way = []
            watch.note(step)
        for member in members:
            member.step()
        if step in evaluated:
            watch.evaluate(step)
        after_step()
    if under_way:
        end(members, under_way)
        watch.note(steps)
    if members[0].pipeline.exchanges_steps:
        watch.evaluate_shared(steps)
        exchange(members, everything=True)
        watch.note(steps)
    watch.evaluate(steps)
    for member in members:
        if member.recorder is not None:
            member.recorder.close()
    watch.course.bytes_sent /= steps
    watch.course.density /= steps
    return watch.course


def exchange(members: list[Member], everything: bool = False) -> None:
    end(members, begin(members, everything))


def begin(members: list[Member], everything: bool = False) -> list[Pending]:
    """The exchange alone, to be handed to `end` some steps later."""
    begun = [(each.pipeline, begun_by(each.pipeline, everything)) for each in members]
    for index in range(len(members[0].pipeline.units)):
        lockstep.run([pipeline.program(pending, index) for pipeline, pending in begun])
    return [pending for _, pending in begun]


def begun_by(pipeline: Pipeline, everything: bool) -> Pending:
    """An exchange of gradients, too, where everything is exchanged: a flush has the residuals alone."""
    own = {name: p.grad for name, p in pipeline.parameters.items() if p.grad is not None}
    given = {name: gradient.as_strided((gradient.numel(),), (1,)) for name, gradient in own.items()}
    return pipeline.begin("flush()", gradients=given) if everything else pipeline.begin()


def end(members: list[Member], begun: list[Pending]) -> None:
    for member, pending in zip(members, begun, strict=True):
        member.pipeline.finish(pending)


class Watch:
    def __init__(self, members: list[Member]) -> None:
        self.members, self.course = members, Course()
        units = members[0].pipeline.units
        # the step in which an element was last sent
        self._sent_in = [torch.zeros(unit.n, dtype=torch.int32, device=unit.device) for unit in units]
        self._elements = sum(unit.n for unit in units)
        self.course.parameters = members[0].training.n
        # all ranks' residuals after the step before an examined one
        self._before = torch.zeros(0, dtype=units[0].dtype, device=units[0].device)

    def evaluate(self, step: int) -> None:
        self.course.steps.append(step)
        self.course.values.append(self.members[0].training.evaluate())

    def evaluate_shared(self, steps: int) -> None:
        first = self.members[0]
        models = first.pipeline.models
        own = {name: part.clone() for name, part in models.own.items()}
        _copy(models.shown(), models.own)
        value = first.training.evaluate()
        _copy(own, models.own)
        self.course.unflushed = value if math.isfinite(value) else None
        self.course.unflushed_bytes = self.course.bytes_sent / steps

    def note(self, step: int) -> None:
        stats = [member.pipeline.stats for member in self.members]
        self.course.bytes_sent += max(each.meter.moved for each in stats)
        self.course.density += stats[0].sent / self._elements
        if step % LOOK_EVERY == 0 and self.members[0].pipeline.exchanges_steps:
            self.course.apart.append(self._apart())
        for index, sent_in in enumerate(self._sent_in):
            update = self.members[0].pipeline.outcomes[index].update
            if step % LOOK_EVERY == 0 and 0 < update.count < update.numel:
                self._look(step, index, update)
            sent_in[update.where] = step
        self._note_xi(step)

    def _apart(self) -> float:
        models = zip(*(member.pipeline.parameters.values() for member in self.members), strict=True)
        with torch.no_grad():
            stacked = (torch.stack(same) for same in models)
            return max(float((same.amax(0) - same.amin(0)).max()) for same in stacked)

    def _look(self, step: int, index: int, update: Sparse) -> None:
        pipelines = [member.pipeline for member in self.members]
        left = torch.stack([list(pipeline.residuals())[index] for pipeline in pipelines])
        spent = torch.stack([pipeline.outcomes[index].spent.to_dense() for pipeline in pipelines])
        self.course.ages.append(float((step - self._sent_in[index][update.where]).float().mean()))
        self.course.waiting.append(float(left.norm() / spent.norm()))
        self.course.fidelity.append(captured((left + spent).sum(0), update))

    def _note_xi(self, step: int) -> None:
        recorders = [member.recorder for member in self.members if member.recorder is not None]
        pipelines = [member.pipeline for member in self.members]
        if not recorders or pipelines[0].scheme.lossless or step % RECORD_EVERY not in (0, RECORD_EVERY - 1):
            return
        left = torch.stack([torch.cat(list(pipeline.residuals())) for pipeline in pipelines]).sum(0)
        if step % RECORD_EVERY:
            self._before = left
            return
        spent = [torch.cat([each.spent.to_dense() for each in pipeline.outcomes]) for pipeline in pipelines]
        update = torch.cat([outcome.update.to_dense() for outcome in pipelines[0].outcomes])
        total, k = left + torch.stack(spent).sum(0), pipelines[0].scheme.k(self._elements)
        xi = differs_from_top_k(total, update, k, total - self._before)
        for recorder in recorders:
            recorder.line["xi"] = xi


def _copy(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    for name, part in source.items():
        target[name].copy_(part)
