"""A rank's part in rivals that gradsieve's own engine runs; steps are numbered as in `local.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gradsieve.schemes import Ctx, Program, Scheme
from gradsieve.testing import Coherence, Exchange, StepPipeline, make_pipeline
from gradsieve_tools.bench.common.virtual import begun_by
from gradsieve_tools.bench.rivals.base import Part
from gradsieve_tools.bench.tasks.training import Training


@dataclass(frozen=True)
class FixedPreview(Coherence):
    """A preview that is chosen and not measured."""

    preview: float = 1.0

    def share(self, world: int) -> float:
        return self.preview

    def after(self, *_: Any) -> FixedPreview:
        return self


class EnginePart(Part):
    def __init__(
        self,
        training: Training,
        ctx: Ctx,
        scheme: Scheme[Any],
        exchange: Exchange,
        preview: float | None = 1.0,
    ) -> None:
        """`preview`: the part of the residual that a rank's own model has. All of it is an ordinary local
        model; None: measured, as by default."""
        super().__init__(training, ctx)
        parameters = dict(training.model.named_parameters())
        stepped = [training.optimizer]
        self.pipeline = make_pipeline(parameters, stepped, scheme, exchange, ctx.rank, ctx.world)
        if isinstance(self.pipeline, StepPipeline) and preview is not None:
            self.pipeline.coherence = FixedPreview(preview=preview)

    def step(self, number: int) -> Program[None]:
        if not self.pipeline.exchanges_steps:
            yield from self.exchange(everything=number == self.training.steps)
            self.take_step()
            return
        self.take_step()  # 1.
        if self.pipeline.begins_exchange():
            yield from self.exchange()

    def exchange(self, everything: bool = False) -> Program[None]:
        pending = begun_by(self.pipeline, everything)
        for index in range(len(self.pipeline.units)):
            yield from self.pipeline.program(pending, index)  # 2.
        self.pipeline.finish(pending)  # 3.

    def finish(self) -> Program[None]:
        whole = self.pipeline.scheme.is_whole and not self.pipeline.since
        if self.pipeline.exchanges_steps and not whole:
            yield from self.exchange(everything=True)


class OuterPart(EnginePart):
    def __init__(
        self,
        training: Training,
        ctx: Ctx,
        scheme: Scheme[Any],
        exchange: Exchange,
        rate: float,
        momentum: float,
    ) -> None:
        super().__init__(training, ctx, scheme, exchange)
        self.rate, self.momentum = rate, momentum
        self.before = {name: part.clone() for name, part in self._shared().items()}
        self.velocity = {name: part.new_zeros(part.shape) for name, part in self.before.items()}

    def _shared(self) -> dict[str, Tensor]:
        kept = self.pipeline.memories()
        return {key.removeprefix("shared/"): kept[key] for key in kept if key.startswith("shared/")}

    def exchange(self, everything: bool = False) -> Program[None]:
        yield from super().exchange(everything)
        for name, shared in self._shared().items():  # 4.
            before, velocity = self.before[name], self.velocity[name]
            mean = before - shared
            velocity.mul_(self.momentum).add_(mean)
            before.sub_(mean.add(velocity, alpha=self.momentum), alpha=self.rate)
            shared.copy_(before)
        self.pipeline.reset_to_shared()

    def finish(self) -> Program[None]:
        if self.pipeline.since:
            yield from self.exchange(everything=True)
