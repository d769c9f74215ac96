"""A rank's part of a checkpoint; and what ranks of another number go on with.

Old ranks' parts are divided among the new ones, rank r mod P' takes that of old rank r, and one all-reduce
tells all of them the mean of what waited, which then waits on each:

    e' = sum over old ranks of e / P        so that sum of e' / P' = sum of e / P

An exchange divides by the number of ranks. So what waits is as much as before where it counts, in the model
that all of it leads to: w - mean e stays where it was. The sum itself grows with the number of ranks, and is
the same again when that is. As all ranks hold the same, x is w - e'. Likewise u, momentum before the
exchange, and h, EF21's estimates, whose sum H follows from them.

Replicated state is rebuilt for the new number; what holds for every number (thresholds, the place in turn)
a scheme takes over (`Scheme.begin`). How alike gradients are is counted over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gradsieve.comm.ops import AllReduce
from gradsieve.feedback.coherence import Coherence
from gradsieve.sync.base import Pipeline
from gradsieve.sync.steps import StepPipeline
from gradsieve.types import Program

Memories: TypeAlias = Sequence[Mapping[str, Tensor]]


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank had."""

    step: int
    figures: Mapping[str, float]
    memories: Mapping[str, Tensor]
    """By kind/parameter, flat, as `Pipeline.kept`."""
    states: list[Any]


def capture(pipeline: Pipeline) -> Part:
    memories = {key: part.clone() for key, part in pipeline.kept().items()}
    return Part(pipeline.step, pipeline.figures(), memories, list(pipeline.states))


def restore(pipeline: Pipeline, part: Part) -> None:
    pipeline.step, pipeline.states = part.step, list(part.states)
    pipeline.set_figures(part.figures)
    for key, view in pipeline.kept().items():
        view.copy_(part.memories[key])
    if isinstance(pipeline, StepPipeline):
        pipeline.renew()


# -- nothing waits --------------------------------------------------------------------------------------


def left_out(pipeline: Pipeline) -> frozenset[str]:
    """Kinds of memory that say nothing where nothing waits."""
    return frozenset({"own", "mark"} if isinstance(pipeline, StepPipeline) else {"residual"})


def nothing_waits(pipeline: Pipeline) -> bool:
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


def resized(pipeline: Pipeline, parts: Mapping[int, Part], old: int) -> Program[Part]:
    """What this rank goes on with, of parts of `old` ranks: at least those that it needs."""
    rank, world = pipeline.rank, pipeline.world
    like = parts[stand_in(rank, old)]
    given = [parts[each].memories for each in given_by(rank, world, old)]
    figures = dict(like.figures)
    if isinstance(pipeline, StepPipeline):
        figures |= _figures_among(pipeline, like.figures, old)
        memories = yield from _two_models(pipeline, like.memories, given, old, figures["preview"])
    else:
        memories = yield from _means(pipeline, like.memories, given, old)
    states = [
        pipeline.scheme.lay(unit.sizes, world, state)
        for unit, state in zip(pipeline.units, like.states, strict=True)
    ]
    return Part(like.step, figures, memories, states)


def _two_models(
    pipeline: StepPipeline, like: Mapping[str, Tensor], given: Memories, old: int, preview: float
) -> Program[dict[str, Tensor]]:
    out: dict[str, Tensor] = {}
    for name, own in pipeline.own.items():
        shared = like[f"shared/{name}"].to(own.device)
        total = torch.zeros_like(shared)
        for each in given:
            waits = each[f"mark/{name}"] - each[f"own/{name}"]
            total += torch.where(waits.isfinite(), waits, 0.0).to(own.device)
        total = yield AllReduce(total)
        waits = total / old
        x = (shared - preview * waits).to(own.dtype)
        out |= {f"shared/{name}": shared, f"own/{name}": x, f"mark/{name}": x.to(shared.dtype) + waits}
    return out


def _means(
    pipeline: Pipeline, like: Mapping[str, Tensor], given: Memories, old: int
) -> Program[dict[str, Tensor]]:
    out = {}
    for key, view in pipeline.kept().items():
        if key.startswith("total/"):  # the sum of all ranks' estimates, each of which becomes their mean
            out[key] = like[key] * (pipeline.world / old)
            continue
        total = torch.zeros_like(view)
        for each in given:
            total += each[key].to(view.device)
        out[key] = (yield AllReduce(total)) / old
    return out


def _figures_among(pipeline: StepPipeline, figures: Mapping[str, float], old: int) -> dict[str, float]:
    """What waits is the same on all ranks now, so that a rank believes all of it."""
    agreement = Coherence(figures["gradients_alike"], figures["gradients_all"]).among(old, pipeline.world)
    fixed = pipeline.treatment.preview
    return {
        "preview": 1.0 if fixed is None else fixed,
        "alike": 0.0,
        "all": 0.0,
        "gradients_alike": agreement.alike,
        "gradients_all": agreement.all,
    }
