"""A rank's part of a checkpoint; and what ranks of another number go on with.

Old ranks' parts are divided among the new ones, rank r mod P' takes that of old rank r, and one all-reduce
gives all of them the mean of the residuals, which is then the residual of each:

    e' = sum over old ranks of e / P        so that sum of e' / P' = sum of e / P

An exchange divides by the number of ranks. So the residual is the same as before where it counts, in the
model that all of it leads to: w - mean e stays where it was. The sum itself grows with the number of ranks,
and is the same again when that is. As all ranks hold the same, x is w - e'.

What only one rank moved is forgotten. Replicated state is rebuilt for the new number; what holds for every
number (thresholds, the place in the round robin) is kept by the scheme (`Scheme.begin`). How alike gradients
are is counted over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradsieve.coherence import Coherence
from gradsieve.comm.ops import AllReduce
from gradsieve.pipeline.base import Pipeline
from gradsieve.pipeline.steps import StepPipeline
from gradsieve.types import Program


@dataclass(frozen=True, slots=True)
class RankState:
    """What one rank had."""

    step: int
    figures: Mapping[str, float]
    memories: Mapping[str, Tensor]  # by kind/parameter, flat, as `Pipeline.kept`
    states: list[Any]
    noted: Sequence[Tensor] = ()  # as `Pipeline.noted`; where ranks are others, nothing
    common: Sequence[Tensor] = ()  # as `Pipeline.common`, likewise


def capture(pipeline: Pipeline) -> RankState:
    memories = {key: part.clone() for key, part in pipeline.kept().items()}
    common = [vector.clone() for vector in pipeline.common()]
    return RankState(
        pipeline.step, pipeline.figures(), memories, list(pipeline.states), pipeline.noted(), common
    )


def restore(pipeline: Pipeline, part: RankState) -> None:
    pipeline.step, pipeline.states = part.step, list(part.states)
    pipeline.set_figures(part.figures)
    for key, view in pipeline.kept().items():
        view.copy_(part.memories[key])
    if isinstance(pipeline, StepPipeline):
        pipeline.set_noted(part.noted)
        pipeline.renew()
        pipeline.set_common(part.common)


# -- the residual is empty ------------------------------------------------------------------------------


def left_out(pipeline: Pipeline) -> frozenset[str]:
    """Kinds of memory that say nothing where the residual is empty."""
    return frozenset({"own", "mark"} if isinstance(pipeline, StepPipeline) else {"residual"})


def has_no_residual(pipeline: Pipeline) -> bool:
    """Whether what `left_out` names follows from the rest, to the last bit."""
    kept = pipeline.kept()
    if not isinstance(pipeline, StepPipeline):
        return not any(bool(part.any()) for key, part in kept.items() if key.startswith("residual/"))
    return all(
        torch.equal(own, kept[f"shared/{name}"].to(own.dtype))
        and torch.equal(own.to(kept[f"mark/{name}"].dtype), kept[f"mark/{name}"])
        for name, own in pipeline.own.items()
    )


def filled_in(pipeline: Pipeline, memories: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """With what was left out, after a flush: x and m are w, residuals 0."""
    out, kept = dict(memories), pipeline.kept()
    for key, view in kept.items():
        kind, _, name = key.partition("/")
        if kind == "residual":
            out[key] = torch.zeros_like(view)
        elif kind in ("own", "mark"):
            out[key] = memories[f"shared/{name}"].to(kept[f"own/{name}"].dtype).to(view.dtype)
    return out


# -- another number of ranks ----------------------------------------------------------------------------


def given_by(rank: int, world: int, old: int) -> range:
    """Old ranks whose memories this one of `world` ranks adds up."""
    return range(rank, old, world)


def stand_in(rank: int, old: int) -> int:
    """The old rank whose replicated state, and optimizer, this one takes."""
    return rank % old


def needed_by(rank: int, world: int, old: int) -> list[int]:
    """Old ranks whose parts this one has to be given."""
    return [rank] if world == old else sorted({*given_by(rank, world, old), stand_in(rank, old)})


def residual_in(memories: Mapping[str, Tensor], name: str) -> Tensor:
    """e = m - x of a parameter. What an optimizer moved to infinity or NaN counts as not moved."""
    residual = memories[f"mark/{name}"] - memories[f"own/{name}"]
    return torch.where(residual.isfinite(), residual, 0.0)


def models_with(
    name: str, shared: Tensor, residual: Tensor, preview: float, own: torch.dtype
) -> dict[str, Tensor]:
    """The three of one parameter: x = w - a e, and m so that e is the residual."""
    x = (shared - preview * residual).to(own)
    return {f"shared/{name}": shared, f"own/{name}": x, f"mark/{name}": x.to(shared.dtype) + residual}


def states_among(pipeline: Pipeline, states: Sequence[Any]) -> list[Any]:
    """Replicated states, which were another number's, for as many ranks as there are now."""
    return [
        pipeline.scheme.init_state(unit.sizes, pipeline.world, state)
        for unit, state in zip(pipeline.units, states, strict=True)
    ]


def figures_among(
    pipeline: StepPipeline, figures: Mapping[str, float], old: int, residuals_differ: bool
) -> dict[str, float]:
    """Where residuals are the same on all ranks now, a rank believes all of its own."""
    residuals = Coherence(figures["alike"], figures["all"]) if residuals_differ else Coherence()
    gradients = Coherence(figures["gradients_alike"], figures["gradients_all"], figures["gradients_seen"])
    residuals, gradients = (measured.among(old, pipeline.world) for measured in (residuals, gradients))
    return {
        **figures,
        "preview": residuals.share(pipeline.world),
        "alike": residuals.numerator,
        "all": residuals.denominator,
        "gradients_alike": gradients.numerator,
        "gradients_all": gradients.denominator,
        "gradients_seen": gradients.samples,
        **({} if old == pipeline.world else {"budget": 0.0, "every": 0.0}),  # others need other bits
    }


class Merger:
    """What one rank goes on with of the parts of `old` ranks, which it is given one after the other: it keeps
    one of them and the sums."""

    def __init__(self, pipeline: Pipeline, old: int) -> None:
        self.pipeline, self.old = pipeline, old
        self.like: RankState | None = None
        self._totals = {  # of steps, the residuals, under the names of the anchors
            key: torch.zeros_like(view)
            for key, view in pipeline.kept().items()
            if not key.startswith(("shared/", "own/"))
        }

    def add(self, rank: int, part: RankState) -> None:
        if rank == stand_in(self.pipeline.rank, self.old):
            self.like = part
        if rank in given_by(self.pipeline.rank, self.pipeline.world, self.old):
            for key, total in self._totals.items():
                kind, _, name = key.partition("/")
                given = residual_in(part.memories, name) if kind == "mark" else part.memories[key]
                total += given.to(total.device)

    def merged(self) -> Program[RankState]:
        """With what the other ranks were given."""
        assert self.like is not None
        pipeline, like = self.pipeline, self.like
        means: dict[str, Tensor] = {}
        for key, total in self._totals.items():  # in the same order on all ranks
            means[key] = (yield AllReduce(total)) / self.old
        memories = {key: like.memories[key].to(view.device) for key, view in pipeline.kept().items()} | means
        figures = dict(like.figures)
        if isinstance(pipeline, StepPipeline):
            figures = figures_among(pipeline, figures, self.old, residuals_differ=False)
            for name, own in pipeline.own.items():
                shared, residual = memories[f"shared/{name}"], means[f"mark/{name}"]
                memories |= models_with(name, shared, residual, figures["preview"], own.dtype)
        return RankState(like.step, figures, memories, states_among(pipeline, like.states))
