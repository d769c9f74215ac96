"""gradsieve's default with one of its parts left out: which of them carries it?

without=nothing    the default, as `stripes` with the same bits: what the others are compared with
        length     steps are as long as the optimizer makes them                   (ADR 41)
        momentum   a rank's momentum keeps what its own batches led it to          (ADR 50)
        preview    a rank's own model has of its residual the newest steps alone   (ADR 11)
        turns      all elements, in signs, as seldom as the budget has it          (ADR 20)
        feedback   what rounding left is dropped
        lateness   the exchange ends before the next gradient: nothing hides it, and a user would
                   not choose this, but it shows what being late costs
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gradsieve import Steps
from gradsieve.schemes import Ctx, Program, Stripes
from gradsieve.testing import StepPipeline, cost
from gradsieve_tools.bench.common.virtual import budget
from gradsieve_tools.bench.rivals.base import Part, Rival
from gradsieve_tools.bench.rivals.engine import EnginePart
from gradsieve_tools.bench.tasks.training import Training

Left = Literal["nothing", "length", "momentum", "preview", "turns", "feedback", "lateness"]


@dataclass(frozen=True, slots=True)
class Ablated(Rival):
    without: Left = "nothing"
    bits: float = 0.75  # bits a parameter and step, the flush included

    def begin(self, training: Training, ctx: Ctx) -> Part:
        return AblatedPart(self, training, ctx)


class AblatedPart(EnginePart):
    pipeline: StepPipeline

    def __init__(self, rival: Ablated, training: Training, ctx: Ctx) -> None:
        self.without, has_turns = rival.without, rival.without != "turns"
        within = budget(rival.bits, training, ctx.world)
        steps = Steps(
            every=1 if has_turns else max(1, round(cost("sign", ctx.world) / within.bits)),
        )
        scheme = Stripes(density=Stripes.density if has_turns else 1.0, values="sign")
        super().__init__(training, ctx, scheme, steps, preview=0.0 if self.without == "preview" else None)
        if has_turns:
            self.pipeline.budget = within
        if self.without == "momentum":
            self.pipeline.models.mean = []

    def step(self, number: int) -> Program[None]:
        due = self.pipeline.begins_exchange()
        if due and self.without != "lateness":
            yield from self.exchange()
        self.pipeline.before_update(self.training.optimizer, self.pipeline.parameters.keys())
        self.take_step()
        if self.without != "length":
            self.pipeline.after_update()
        if due and self.without == "lateness":
            yield from self.exchange()

    def exchange(self, everything: bool = False) -> Program[None]:
        yield from super().exchange(everything)
        if self.without == "feedback" and not everything:
            self._forget()

    def _forget(self) -> None:
        """Go on from the shared model at sent elements, as if all of them had arrived."""
        models = self.pipeline.models
        for index, outcome in enumerate(self.pipeline.outcomes):
            sent = outcome.update
            for here, own in models.pieces(index, sent.start, sent.stop):
                own.copy_(models.shared[index][here])
                models.reference[index][here] = models.shared[index][here]
