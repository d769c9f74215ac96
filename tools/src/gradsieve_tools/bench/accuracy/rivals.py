"""A task trained by a rival. Most run on virtual ranks (`rivals/runs.py`).

Virtual ranks cannot run torch's own communication hooks, nor torchft: these train in real processes on the
loopback. Model, shards, batches and evaluations are those of `common/virtual.py`.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradsieve.errors import ConfigError
from gradsieve_tools.bench.common.machine import one_thread
from gradsieve_tools.bench.common.ranks import leave, run_ranks
from gradsieve_tools.bench.common.virtual import Course, looks, own_batches
from gradsieve_tools.bench.rivals import runs as rival_runs
from gradsieve_tools.bench.rivals.base import Rival, RivalRun, Shapes, all_reduce_bytes, elements
from gradsieve_tools.bench.rivals.names import (
    POWERSGD_FROM,
    POWERSGD_RANK,
    RIVALS,
    bucket_cap_mb,
    buffers_stay,
    torch_hook,
)
from gradsieve_tools.bench.rivals.torchft import NAMES as TORCHFT
from gradsieve_tools.bench.rivals.torchft import Torchft
from gradsieve_tools.bench.tasks import training as tasks
from gradsieve_tools.specs import with_settings

_COURSE = "course.json"


@dataclass(frozen=True, slots=True)
class Hook:
    name: str
    rank: int = POWERSGD_RANK  # columns of both factors of a matrix (PowerSGD)

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ConfigError(f"{self.name}: rank is a number of columns, from 1 up, not {self.rank}")

    def check(self, steps: int) -> None:
        """It goes with any number."""

    def attach(self, ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
        hook = torch_hook(self.name, self.rank)
        assert hook is not None  # torch has all of them
        ddp.register_comm_hook(*hook)

    def bytes_sent(self, shapes: Shapes, world: int, steps: int) -> float:
        if self.name == "fp16":
            return all_reduce_bytes(2 * elements(shapes), world)
        whole = min(steps, POWERSGD_FROM)
        dense = all_reduce_bytes(4 * elements(shapes), world)
        return (whole * dense + (steps - whole) * powersgd_bytes(shapes, self.rank, world)) / steps


def is_rival(sync: str) -> bool:
    return sync.partition(":")[0] in (*RIVALS, *TORCHFT, *rival_runs.RIVALS)


def parse(text: str) -> Hook | Torchft | Rival:
    """A rival as text: `fp16`, `powersgd:rank=4`, `diloco:every=32`, `torchft-diloco:every=32`."""
    name, colon, settings = text.partition(":")
    if name in rival_runs.RIVALS:
        return rival_runs.parse(text)
    rival: Hook | Torchft = Torchft(name) if name in TORCHFT else Hook(name)
    fixed = {"fp16": ["name", "rank"], "torchft-local-sgd": ["name", "rate", "momentum"]}.get(name, ["name"])
    return with_settings(rival, name, settings, fixed) if colon else rival


def powersgd_bytes(shapes: Shapes, rank: int, world: int) -> float:
    """Moved by a rank in a step of PowerSGD: both factors of each matrix, and all of the other tensors."""
    return all_reduce_bytes(4 * sum(_powersgd_elements(shape, rank) for shape in shapes), world)


def _powersgd_elements(shape: Sequence[int], rank: int) -> int:
    """Count as torch's hook does: dimensions after the first are columns, and factors have to halve the
    matrix."""
    rows, columns = shape[0], math.prod(shape[1:])
    factors = min(rows, columns, rank) * (rows + columns)
    return factors if 2 * factors < rows * columns else rows * columns


def train(run: RivalRun, after_step: Callable[[], None]) -> Course:
    """Hooks and torchft in `world` processes of their own; `after_step` is called in that of rank 0."""
    if isinstance(run.rival, Rival):
        with one_thread():
            return rival_runs.train(run, run.rival, after_step)
    run.rival.check(run.steps)
    with tempfile.TemporaryDirectory(prefix="gradsieve-rival-") as folder:
        run_ranks(_rank, (run, folder, after_step), run.world)
        return Course(**json.loads((Path(folder) / _COURSE).read_text()))


def _rank(rank: int, run: RivalRun, folder: str, after_step: Callable[[], None]) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=run.world)
    course = learn(run, after_step)
    if rank == 0:
        (Path(folder) / _COURSE).write_text(json.dumps(asdict(course)))
    leave()


def learn(run: RivalRun, after_step: Callable[[], None]) -> Course:
    """Train one rank in a process group; rank 0 evaluates and returns the course."""
    rank, course = dist.get_rank(), Course(density=1.0)
    rival = run.rival
    assert isinstance(rival, Hook | Torchft)
    training = tasks.build(run.task, run.seed, run.steps, run.batch, run.rate)
    # Batch norm's running statistics are rank 0's without any broadcast: only its model is evaluated.
    ddp = DistributedDataParallel(training.model, bucket_cap_mb=bucket_cap_mb(rival.name), **buffers_stay())
    _running = rival.attach(ddp, training.optimizer)  # lives as long as the training
    batches = own_batches(training, rank, run.world, run.mixed, run.seed)
    evaluated = looks(run.steps)
    for step in range(1, run.steps + 1):
        batch = training.train.take(next(batches))
        training.optimizer.zero_grad()
        torch.autograd.backward(training.loss(ddp(*batch.inputs), batch.target))
        training.optimizer.step()
        training.schedule.step()
        if rank == 0:
            if step in evaluated:
                course.steps.append(step)
                course.values.append(training.evaluate())
            after_step()
    course.parameters = training.n
    shapes = [parameter.shape for parameter in training.model.parameters()]
    course.bytes_sent = rival.bytes_sent(shapes, run.world, run.steps)
    return course
