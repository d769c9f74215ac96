"""Training with known gradients, on a real rank (`Run`) or on virtual ones (`Virtual`), and its laws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import gradsieve
from gradsieve.comm import lockstep
from gradsieve.pipeline.exchange_settings import Gradients
from gradsieve.pipeline.gradients import GradientPipeline
from gradsieve.schemes import SCHEMES, make
from gradsieve.schemes.base import Scheme
from gradsieve.types import replicated_fields, stored_fields
from multiproc.models import SHAPES, Whole, whole_numbers
from previews import fix_preview

RATE = 2.0**-6
GRADIENTS = gradsieve.Gradients()
"""Gradients are exchanged, so that all ranks have one model; tests of steps say so."""


def registered(*, lossless: bool = True) -> list[str]:
    """Every scheme that communicates by rules of our own; without the lossless ones, every one that has
    residuals. Published rules have their own tests: they have one unit only."""
    ours = {name: kind for name, kind in SCHEMES.items() if not kind.no_comm and not kind.whole_model}
    return [name for name, kind in ours.items() if lossless or not kind.lossless]


TYPICAL = ["dense", "topk", "gtopk", "cltk", "oktopk", "spardl", "exdyna", "stripes"]
"""One scheme for each way of talking (a test sees to it): for what lies around the schemes, these tell."""


USUAL = ["dense", "oktopk", "exdyna", "stripes"]
"""For what lies around the engine and sees of a scheme only its outcome: all, few or striped places."""


def usual(*, lossless: bool = True) -> list[str]:
    return [name for name in USUAL if lossless or not SCHEMES[name].lossless]


def typical(*, lossless: bool = True) -> list[str]:
    return [name for name in TYPICAL if lossless or not SCHEMES[name].lossless]


def private_fields() -> list[str]:
    """Fields of any scheme's State that are the rank's own."""
    states = [kind().begin(1, 1) for kind in SCHEMES.values()]
    return [name for state in states for name in stored_fields(state) if name not in replicated_fields(state)]


@dataclass(frozen=True)
class Plan:
    """A training of `Whole`."""

    scheme: str | Scheme[Any] = "exdyna"
    density: float = 0.05
    steps: int = 6
    cap_mb: float = 0.01
    """Of the buckets: this gives several units."""
    shapes: tuple[tuple[int, ...], ...] = SHAPES
    dtypes: tuple[torch.dtype, ...] = ()
    micro: int = 1
    """Backward passes to an optimizer step."""
    ddp: Mapping[str, Any] = field(default_factory=dict)
    optimizer: type[torch.optim.Optimizer] = torch.optim.SGD
    memory: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the optimizer beside its rate."""
    exchange: gradsieve.Steps | gradsieve.Gradients | None = GRADIENTS
    preview: float | None = None
    """Fixed, for sums that are exact."""
    loss_scale: float | None = None
    """Train with a GradScaler that begins here and doubles every fourth step."""

    def gradients(self, step: int, rank: int, micro: int = 0) -> list[Tensor | None]:
        return [*whole_numbers(self.shapes, step, rank, micro=micro)]


@dataclass
class Seen:
    """What one rank saw of a training, tensors by parameter name."""

    parameters: dict[str, Tensor] = field(default_factory=dict)
    fed: dict[str, Tensor] = field(default_factory=dict)
    """Sum of its own gradients."""
    applied: dict[str, Tensor] = field(default_factory=dict)
    """Sum of the gradients that its optimizer was given."""
    state: dict[str, Tensor] = field(default_factory=dict)
    """`state_dict` without the rank."""
    units: int = 0

    @property
    def residuals(self) -> dict[str, Tensor]:
        """In the units of the gradients, whatever the loss scale."""
        begin, scale = "residual/", float(self.state.get("figure/residual_scale", 1.0))
        kept = [key for key in self.state if key.startswith(begin)]
        return {key.removeprefix(begin): self.state[key] / scale for key in kept}

    @property
    def replicated(self) -> dict[str, Tensor]:
        own = tuple(f"/{name}" for name in private_fields())
        shared = [key for key in self.state if not key.startswith("residual/") and not key.endswith(own)]
        return {**self.parameters, **{key: self.state[key] for key in shared}}

    def note(self, sums: dict[str, Tensor], name: str, amount: Tensor | None, shape: torch.Size) -> None:
        total = sums.setdefault(name, torch.zeros(shape, dtype=torch.float64))
        if amount is not None:
            total += amount.double()


class Run:
    """One rank's training through DistributedDataParallel."""

    def __init__(self, rank: int, plan: Plan, model: torch.nn.Module | None = None) -> None:
        self.rank, self.plan, self.seen = rank, plan, Seen()
        self.model = model or Whole(plan.shapes, plan.dtypes)
        self.optimizer = plan.optimizer(self.model.parameters(), lr=RATE, **plan.memory)
        self.ddp = DistributedDataParallel(self.model, bucket_cap_mb=plan.cap_mb, **plan.ddp)
        self.scaler = None
        if plan.loss_scale is not None:
            self.scaler = torch.amp.GradScaler("cpu", init_scale=plan.loss_scale, growth_interval=4)
        self.sync = gradsieve.attach(
            self.ddp,
            self.optimizer,
            scheme=plan.scheme,
            density=plan.density,
            exchange=plan.exchange,
            scaler=self.scaler,
        )
        fix_preview(self.sync.pipeline, plan.preview)

    def train(self, steps: int | None = None) -> Run:
        for step in range(self.plan.steps if steps is None else steps):
            micros = range(self.plan.micro)
            self.step(*(self.plan.gradients(step, self.rank, micro) for micro in micros))
        return self

    def step(self, *micro_gradients: Sequence[Tensor | None]) -> None:
        self.optimizer.zero_grad()
        self.backward(*micro_gradients)
        self.apply()

    def backward(self, *micro_gradients: Sequence[Tensor | None], counts: bool = True) -> None:
        """All but the last pass under `no_sync`. Gradients of a step to be skipped do not count as fed."""
        for number, gradients in enumerate(micro_gradients, start=1):
            with ExitStack() as stack:
                if number < len(micro_gradients):
                    stack.enter_context(self.ddp.no_sync())
                loss = self.ddp(gradients)
                (loss if self.scaler is None else self.scaler.scale(loss)).backward()
            if counts:
                self.feed(gradients)

    def feed(self, gradients: Sequence[Tensor | None]) -> None:
        for (name, parameter), gradient in zip(self.model.named_parameters(), gradients, strict=True):
            if parameter.requires_grad:
                self.seen.note(self.seen.fed, name, gradient, parameter.shape)

    def apply(self) -> None:
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        if self.sync.pipeline.last_step_good:
            for name, parameter in self.model.named_parameters():
                if parameter.requires_grad:
                    self.seen.note(self.seen.applied, name, parameter.grad, parameter.shape)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def report(self) -> Seen:
        self.seen.parameters = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self.seen.state = without_rank(self.sync.state_dict(), self.rank)
        self.seen.units = len(self.sync.pipeline.units)
        return self.seen


class Virtual:
    """The same training on virtual ranks, advanced in lockstep in this process."""

    def __init__(self, plan: Plan, world: int) -> None:
        self.plan, self.seen = plan, [Seen() for _ in range(world)]
        self.models = [Whole(plan.shapes, plan.dtypes) for _ in range(world)]
        scheme = make(plan.scheme, plan.density)
        named = [dict(model.named_parameters()) for model in self.models]
        self.pipelines = [
            GradientPipeline(parameters, (), scheme, Gradients(), rank, world, plan.cap_mb)
            for rank, parameters in enumerate(named)
        ]

    def train(self) -> list[Seen]:
        ranks = range(len(self.models))
        for step in range(self.plan.steps):
            self.step([self.plan.gradients(step, rank) for rank in ranks])
        return self.seen_now()

    def seen_now(self) -> list[Seen]:
        for rank in range(len(self.models)):
            seen, parameters = self.seen[rank], dict(self.models[rank].named_parameters())
            seen.parameters = {name: parameter.detach() for name, parameter in parameters.items()}
            for key, part in self.pipelines[rank].memories().items():
                seen.state[key] = part.view(parameters[key.removeprefix("residual/")].shape)
        return self.seen

    def step(self, gradients: Sequence[Sequence[Tensor | None]]) -> list[dict[str, Tensor]]:
        """One exchange and plain SGD; the mean gradients by rank and name."""
        means = []
        for rank, (model, own) in enumerate(zip(self.models, gradients, strict=True)):
            means.append({})
            for (name, parameter), gradient in zip(model.named_parameters(), own, strict=True):
                self.seen[rank].note(self.seen[rank].fed, name, gradient, parameter.shape)
                flat = torch.zeros_like(parameter) if gradient is None else gradient.to(parameter.dtype)
                means[rank][name] = flat.clone().flatten()
        begun = [p.begin(gradients=mean) for p, mean in zip(self.pipelines, means, strict=True)]
        for index in range(len(self.pipelines[0].units)):
            lockstep.run([p.program(own, index) for p, own in zip(self.pipelines, begun, strict=True)])
        self._apply(means)
        return means

    @torch.no_grad()
    def _apply(self, means: list[dict[str, Tensor]]) -> None:
        if not self.pipelines[0].last_step_good:
            return
        for seen, model, mean in zip(self.seen, self.models, means, strict=True):
            for name, parameter in model.named_parameters():
                seen.note(seen.applied, name, mean[name].view(parameter.shape), parameter.shape)
                parameter -= RATE * mean[name].view(parameter.shape)


def without_rank(state: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
    return {key.removeprefix(f"rank{rank}/"): part for key, part in state.items()}


def snapshot(run: Any) -> dict[str, Tensor]:
    """All that a step may change on this rank: parameters, optimizer's memory, residuals, scheme states."""
    out = {f"parameter/{name}": p.detach().clone() for name, p in run.model.named_parameters()}
    for number, memory in enumerate(run.optimizer.state.values()):
        kept = {key: value for key, value in memory.items() if isinstance(value, Tensor)}
        out.update({f"optimizer/{number}/{key}": value.clone() for key, value in kept.items()})
    return {**out, **without_rank(run.sync.state_dict(), run.rank)}


# -- the laws, each a function that raises AssertionError where it is broken --------------------------


def differing(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> list[str]:
    """Names under which the two do not hold the same bits."""
    names = [*left, *(name for name in right if name not in left)]
    return [name for name in names if not _same_bits(left.get(name), right.get(name))]


def _same_bits(left: Tensor | None, right: Tensor | None) -> bool:
    if left is None or right is None or left.dtype != right.dtype or left.shape != right.shape:
        return False
    return torch.equal(*(part.contiguous().flatten().view(torch.uint8) for part in (left, right)))


def check_replicas(seen: Sequence[Seen]) -> None:
    """Parameters and replicated state are the same bits on every rank."""
    for rank, other in enumerate(seen):
        names = differing(seen[0].replicated, other.replicated)
        assert not names, f"rank {rank} differs from rank 0 in {names}"


def check_nothing_lost(seen: Sequence[Seen], room: float = 0.0) -> None:
    """All gradients of all ranks == world * what was applied + what all ranks hold, element by element."""
    for name in seen[0].fed:
        fed = torch.stack([each.fed[name] for each in seen]).sum(0)
        applied = len(seen) * seen[0].applied[name]
        parts = [each.residuals[name].double() for each in seen if name in each.residuals]
        held = torch.stack(parts).sum(0) if parts else torch.zeros_like(fed)
        worst = float((fed - applied - held).abs().max())
        assert worst <= room, f"{name}: gradients of {worst:g} were lost or made up in one element"


def check_applied(seen: Sequence[Seen]) -> None:
    """Plain SGD from zero: parameters hold what was applied, so nothing was applied twice or not at all."""
    for each in seen:
        for name, applied in each.applied.items():
            assert torch.equal(each.parameters[name].double(), -RATE * applied), (
                f"{name} is not what was applied"
            )


def check_laws(seen: Sequence[Seen]) -> None:
    check_replicas(seen)
    check_nothing_lost(seen)
    check_applied(seen)
