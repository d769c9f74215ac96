"""What one rank does in a cell of `compat.py`: a short training in one of the ways in which people train.

plain        forward, backward, step
scaler       a GradScaler, and steps in which the loss of one rank overflows, the first one among them
two-models   encoder and decoder in a DistributedDataParallel each, one optimizer over both
ema          averages of the parameters, taken after the step and in a hook of the step
compile      torch.compile(backend="eager") around optimizer.step()
accumulate   two micro-batches a step, the first of them under no_sync()
resume       saved half-way as docs/checkpoints.md says; a fresh model and sync go on from there
"""

from __future__ import annotations

import hashlib
import logging
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import torch._dynamo
import torch.distributed as dist
from compat_optimizers import ROWS, Row
from compat_task import BATCH, HELD_OUT, WORLD, Data, network
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import MultiStepLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import gradsieve

CELLS = ("plain", "scaler", "two-models", "ema", "compile", "accumulate", "resume")
STEPS = 200
DECAY = 0.9
"""Of the averages."""
SETTINGS = (
    *(
        "lr",
        "initial_lr",
        "weight_decay",
        "betas",
        "momentum",
        "dampening",
        "nesterov",
        "eps",
        "alpha",
        "rho",
    ),
    *(
        "lambd",
        "t0",
        "etas",
        "step_sizes",
        "centered",
        "momentum_decay",
        "lr_decay",
        "beta2_decay",
        "ns_steps",
    ),
    *("ns_coefficients", "amsgrad", "maximize", "foreach", "fused", "warmup_steps"),
)
"""What a user sets in a group, unlike counters that some optimizers keep there."""


class Sync(Protocol):
    """What a training asks of what was attached."""

    def flush(self) -> None: ...

    def close(self) -> None: ...

    def save(self, folder: Path) -> None: ...

    def load(self, folder: Path) -> None: ...


Attach = Callable[[DistributedDataParallel, Any], Sync]


def with_gradsieve(ddp: DistributedDataParallel, optimizer: Any) -> Sync:
    return gradsieve.attach(ddp, optimizer, bits=2.0)


@dataclass
class Dense:
    """Nothing is attached: DDP averages gradients by itself."""

    ddp: DistributedDataParallel
    optimizer: Any

    def flush(self) -> None: ...

    def close(self) -> None: ...

    def save(self, folder: Path) -> None:
        torch.save(self.optimizer.state_dict(), folder / f"optimizer{dist.get_rank()}.pt")

    def load(self, folder: Path) -> None:
        # Our own file; some optimizers keep tensors of classes of their own.
        stored = torch.load(folder / f"optimizer{dist.get_rank()}.pt", weights_only=False)
        self.optimizer.load_state_dict(stored)


def alone(ddp: DistributedDataParallel, optimizer: Any) -> Sync:
    """Nothing is exchanged: every cell has to come out wrong."""

    def own_gradient(_: Any, bucket: Any) -> torch.futures.Future[Tensor]:
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    own_gradient.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[Tensor]}
    ddp.register_comm_hook(None, own_gradient)
    return Dense(ddp, optimizer)


SYNCS: dict[str, Attach] = {"gradsieve": with_gradsieve, "dense": Dense, "alone": alone}


# -- what is seen ------------------------------------------------------------------------------------------


@dataclass
class Seen:
    """How a cell went on one rank."""

    at_start: float = 0.0
    """Loss on what is held out, before the training."""
    losses: dict[str, float] = field(default_factory=dict)
    """And after it: of the model and, if taken, of averages."""
    digests: dict[str, list[str]] = field(default_factory=dict)
    """Of what has to be the same on all ranks, after every step and at the end."""
    changed_setting: tuple[str, str] | None = None
    """What was seen where, and the values."""
    went_on_alike: bool | None = None
    """Of `resume`: whether it ended in the bits of the undisturbed run."""
    skipped: int = 0
    graphs: int = 0
    """Of `compile`."""
    cpu_seconds: float = 0.0
    said: list[str] = field(default_factory=list)
    """gradsieve's warnings."""

    def note(self, what: str, tensors: Iterable[Tensor]) -> None:
        self.digests.setdefault(what, []).append(digest(tensors))


def digest(tensors: Iterable[Tensor]) -> str:
    whole = hashlib.sha256()
    for tensor in tensors:
        whole.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()[:16]


def settings_of(optimizer: Any) -> list[dict[str, str]]:
    """Of every group, as text: 0.1 in the place of tensor(0.1) is a change too."""
    return [{key: repr(group[key]) for key in SETTINGS if key in group} for group in optimizer.param_groups]


@dataclass
class Watch:
    """Compares an optimizer's settings with what they were just before its step."""

    optimizer: Any
    seen: Seen
    before: list[dict[str, str]] = field(default_factory=list)
    step: int = 0

    def begin(self, step: int) -> None:
        self.step, self.before = step, settings_of(self.optimizer)

    def look(self, where: str) -> None:
        if self.seen.changed_setting is None and (now := settings_of(self.optimizer)) != self.before:
            pairs = [
                (key, old[key], new.get(key))
                for old, new in zip(self.before, now, strict=True)
                for key in old
            ]
            name, old, new = next(each for each in pairs if each[1] != each[2])
            self.seen.changed_setting = f"{where} {name} is changed", f"{new} for {old} in step {self.step}"

    def in_hook(self, where: str) -> Callable[..., None]:
        return lambda *_: self.look(where)


# -- a training --------------------------------------------------------------------------------------------


class Training:
    """Of one row in one cell, on one rank."""

    def __init__(self, rank: int, row: Row, cell: str, attach: Attach, steps: int, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.rank, self.row, self.cell, self.steps, self.seen = rank, row, cell, steps, Seen()
        encoder, decoder = network(row.network)
        self.model = nn.Sequential(encoder, decoder)
        self.parameters = list(self.model.parameters())
        self.dtype = self.parameters[0].dtype
        self.data = Data.drawn(steps * BATCH, rank, seed=1)
        parts = [encoder, decoder] if cell == "two-models" else [self.model]
        self.ddps = [DistributedDataParallel(part) for part in parts]
        self.optimizer = row.make(self.parameters)
        self.averages: dict[str, AveragedModel] = {}
        watched = cell != "compile" and hasattr(self.optimizer, "register_step_post_hook")
        self.watch = Watch(self.optimizer, self.seen)
        if watched:
            self.optimizer.register_step_post_hook(self.watch.in_hook("in a step hook made before attach"))
        self.syncs = [attach(ddp, self.optimizer) for ddp in self.ddps]
        if watched:
            self.optimizer.register_step_post_hook(self.watch.in_hook("in a step hook made after attach"))
        if cell == "ema":
            self._take_averages(in_hook=watched)
        self.schedule = None
        if row.schedule:
            self.schedule = MultiStepLR(self.optimizer, [steps * 6 // 10, steps * 17 // 20], gamma=0.3)
        self.scaler = None
        if cell == "scaler":
            self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=50)
        self.update: Callable[..., Any] = lambda **closure: self.optimizer.step(**closure)
        if cell == "compile":
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
            self.update = torch.compile(self.update, backend="eager")
        self.mode("train")
        self.seen.at_start = self.held_out(self.model)

    def mode(self, name: str) -> None:
        """Schedule-Free optimizers have to be told."""
        if callable(switch := getattr(self.optimizer, name, None)):
            switch()

    def overflows(self, step: int) -> bool:
        bad = {0: 1, self.steps // 4: 1, self.steps // 4 + 1: 1, self.steps // 2: 0}
        return self.cell == "scaler" and bad.get(step) == self.rank

    def train(self, begin: int, end: int) -> None:
        for step in range(begin, end):
            self.watch.begin(step)
            self._step(step)
            self.watch.look("after a step")
            self.seen.note("parameters", self.parameters)
            if "after the step" in self.averages:
                self.averages["after the step"].update_parameters(self.model)
            for where, average in self.averages.items():
                self.seen.note(f"averages taken {where}", average.module.parameters())
            if self.schedule is not None:
                self.schedule.step()
            if step in (self.steps // 3, self.steps * 2 // 3):
                self.mode("eval")
                self.seen.note("parameters in evaluation", self.parameters)
                self.mode("train")

    def end(self) -> Seen:
        for sync in self.syncs:
            sync.flush()
        self.mode("eval")
        self.seen.note("parameters at the end", self.parameters)
        self.seen.losses["model"] = self.held_out(self.model)
        for where, average in self.averages.items():
            self.seen.losses[f"averages taken {where}"] = self.held_out(average.module)
        for sync in self.syncs:
            sync.close()
        if self.cell == "compile":
            self.seen.graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
            torch._dynamo.reset()
        return self.seen

    @torch.no_grad()
    def held_out(self, model: nn.Module) -> float:
        parts = [Data.drawn(HELD_OUT, rank, seed=2).loss(model, self.dtype) for rank in range(WORLD)]
        return float(torch.stack(parts).mean())

    def save(self, folder: Path) -> None:
        if self.rank == 0:
            folder.mkdir()
            torch.save(self.model.state_dict(), folder / "model.pt")
        dist.barrier()
        if self.schedule is not None:
            torch.save(self.schedule.state_dict(), folder / f"schedule{self.rank}.pt")
        self.syncs[0].save(folder)

    def load(self, folder: Path) -> None:
        self.model.load_state_dict(torch.load(folder / "model.pt", weights_only=True))
        self.syncs[0].load(folder)
        if self.schedule is not None:
            self.schedule.load_state_dict(torch.load(folder / f"schedule{self.rank}.pt"))

    def _step(self, step: int) -> None:
        closure = {"closure": lambda: self._backward(step, mean=True)} if self.row.takes_closure else {}
        if not closure or self.scaler is not None:
            self._backward(step)
        if self.scaler is None:
            self.update(**closure)
            return
        before = self.scaler.get_scale()
        self.scaler.step(self.optimizer, **closure)  # which refuses a closure
        self.scaler.update()
        self.seen.skipped += self.scaler.get_scale() < before

    def _backward(self, step: int, mean: bool = False) -> Tensor:
        """The loss; as a mean over ranks for a closure, by which an optimizer goes."""
        self.optimizer.zero_grad()
        total = torch.zeros(())
        for micro in (micros := list(self._micro_batches(step))):
            with ExitStack() as stack:
                if micro is not micros[-1]:
                    stack.enter_context(self.ddps[0].no_sync())
                loss = self.data.loss(self._forward, self.dtype, micro) / len(micros)
                loss = loss * float("inf") if self.overflows(step) else loss
                (loss if self.scaler is None else self.scaler.scale(loss)).backward()
            total += loss.detach()
        if mean:
            dist.all_reduce(total)
        return total / WORLD

    def _forward(self, inputs: Tensor) -> Tensor:
        for ddp in self.ddps:
            inputs = ddp(inputs)
        return inputs

    def _micro_batches(self, step: int) -> Iterator[slice]:
        size = BATCH // 2 if self.cell == "accumulate" else BATCH
        for start in range(step * BATCH, (step + 1) * BATCH, size):
            yield slice(start, start + size)

    def _take_averages(self, in_hook: bool) -> None:
        for where in ("after the step", "in a hook of the step")[: 1 + in_hook]:
            self.averages[where] = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
        if in_hook:
            average = self.averages["in a hook of the step"]
            self.optimizer.register_step_post_hook(lambda *_: average.update_parameters(self.model))


class Kept(logging.Handler):
    """Messages, instead of lines among those of the command."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if len(self.messages) < 5:
            self.messages.append(record.getMessage())


@contextmanager
def quiet() -> Iterator[list[str]]:
    """What gradsieve has to say; others would talk of skipped steps, recompilation and missing GPUs."""
    for name in ("torch", "torchao", "bitsandbytes"):
        logging.getLogger(name).setLevel(logging.ERROR)
    logger, kept = logging.getLogger("gradsieve"), Kept()
    logger.addHandler(kept)
    logger.propagate = False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield kept.messages
    finally:
        logger.removeHandler(kept)


def run_cell(rank: int, row: str, cell: str, attach: Attach, folder: str, steps: int = STEPS) -> Seen:
    """One cell, on one rank."""
    torch.compiler.set_stance(force_backend="eager")  # torchao compiles its step: a minute, with inductor
    start = time.process_time()
    with quiet() as said:
        seen = trained(rank, ROWS[row], cell, attach, Path(folder), steps)
    seen.said, seen.cpu_seconds = said, time.process_time() - start
    return seen


def trained(rank: int, row: Row, cell: str, attach: Attach, folder: Path, steps: int) -> Seen:
    training = Training(rank, row, cell, attach, steps)
    if cell != "resume":
        training.train(0, steps)
        return training.end()
    training.train(0, steps // 2)
    training.save(folder)
    training.train(steps // 2, steps)
    undisturbed = training.end()
    again = Training(rank, row, cell, attach, steps, seed=1)
    again.load(folder)
    again.train(steps // 2, steps)
    seen = again.end()
    last = "parameters at the end"
    seen.went_on_alike = seen.digests[last] == undisturbed.digests[last]
    return seen
