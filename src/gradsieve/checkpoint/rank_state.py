"""A rank's part of a checkpoint, and what it becomes when the number of ranks changes.

Old ranks' residuals are divided among the new ranks, rank r mod P' adds that of old rank r, and one
all-reduce gives all of them the mean, which is then the residual of each:

    e' = sum over old ranks of e / P        so that sum of e' / P' = sum of e / P

An exchange divides by the number of ranks. So the model that all residuals lead to, w - mean e, stays where
it was. As all ranks hold the same residual, x is w - e'.

What only one rank moved is forgotten. Replicated state is rebuilt for the new number; thresholds and the
place in the round robin, which hold for every number, are kept by the scheme. The agreement of gradients is
counted over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gradsieve.comm.ops import AllReduce
from gradsieve.pipeline.base import Pipeline
from gradsieve.types import Program


@dataclass(frozen=True, slots=True)
class RankState:
    step: int
    figures: Mapping[str, float]
    memories: Mapping[str, Tensor]  # by kind/parameter, flat, as `Pipeline.kept`
    states: list[Any]  # the schemes', by unit
    samples: Sequence[Tensor] = ()  # as `Pipeline.samples`; empty if the number of ranks changed
    mean: Sequence[Tensor] = ()  # as `Models.mean`, likewise
    optimizers: Sequence[Any] = ()  # their states, if they are to be loaded


def capture(pipeline: Pipeline) -> RankState:
    memories = {key: part.clone() for key, part in pipeline.kept().items()}
    mean = [vector.clone() for vector in pipeline.models.mean]
    return RankState(
        pipeline.step, pipeline.figures(), memories, list(pipeline.states), pipeline.samples(), mean
    )


def restore(pipeline: Pipeline, part: RankState) -> None:
    pipeline.step, pipeline.states = part.step, list(part.states)
    pipeline.set_figures(part.figures)
    for key, view in pipeline.kept().items():
        view.copy_(part.memories[key])
    pipeline.after_load(part.samples, part.mean)


# -- residuals ------------------------------------------------------------------------------------------


def is_redundant(key: str) -> bool:
    """Return whether a memory follows from the shared model if the residual is empty."""
    return key.startswith(("own/", "mark/", "residual/"))


def flushed(key: str, memories: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> Tensor:
    """Return what a redundant memory is after a flush: x and m are w, a residual is 0."""
    kind, _, name = key.partition("/")
    if kind == "residual":
        return torch.zeros(like[key].shape, dtype=like[key].dtype, device="cpu")
    return memories[f"shared/{name}"].to(like[f"own/{name}"].dtype).to(like[key].dtype)


def has_no_residual(pipeline: Pipeline) -> bool:
    """Return whether the redundant memories follow from the others, to the last bit."""
    kept = pipeline.kept()
    return all(
        torch.equal(view, flushed(key, kept, kept).to(view.device))
        for key, view in kept.items()
        if is_redundant(key)
    )


def residual_in(memories: Mapping[str, Tensor], name: str) -> Tensor:
    """Return e = m - x of a parameter. What an optimizer moved to infinity or NaN counts as not moved."""
    residual = memories[f"mark/{name}"] - memories[f"own/{name}"]
    return torch.where(residual.isfinite(), residual, 0.0)


def with_residuals(
    memories: Mapping[str, Tensor], residuals: Mapping[str, Tensor], preview: float
) -> dict[str, Tensor]:
    """Set these residuals, by parameter, beside the same shared model: x = w - a e, and m = x + e."""
    out = dict(memories)
    for name, residual in residuals.items():
        shared, own = memories[f"shared/{name}"], memories[f"own/{name}"]
        e = residual.to(shared.device)
        x = (shared - preview * e).to(own.dtype)
        out |= {f"own/{name}": x, f"mark/{name}": x.to(shared.dtype) + e}
    return out


# -- another number of ranks ----------------------------------------------------------------------------


def ranks_to_sum(rank: int, world: int, old: int) -> range:
    """Return the old ranks whose residuals this one of `world` ranks adds up."""
    return range(rank, old, world)


def source_rank(rank: int, old: int) -> int:
    """Return the old rank whose replicated state, and optimizers, this one takes."""
    return rank % old


def ranks_to_read(rank: int, world: int, old: int) -> list[int]:
    return [rank] if world == old else sorted({*ranks_to_sum(rank, world, old), source_rank(rank, old)})


def for_world(pipeline: Pipeline, part: RankState, old: int, residuals_differ: bool) -> RankState:
    """Rebuild what depends on the number of ranks. If all have the same residual now, a rank believes it."""
    figures = pipeline.figures_among(part.figures, old, residuals_differ)
    return RankState(part.step, figures, part.memories, pipeline.init_states(pipeline.world, part.states))


class Merger:
    """Sum up the residuals in parts of `old` ranks, given one after the other."""

    def __init__(self, pipeline: Pipeline, old: int) -> None:
        self.pipeline, self.old = pipeline, old
        self._totals = {
            key: torch.zeros_like(view)
            for key, view in pipeline.kept().items()
            if not key.startswith(("shared/", "own/"))
        }

    def add(self, rank: int, part: RankState) -> None:
        if rank in ranks_to_sum(self.pipeline.rank, self.pipeline.world, self.old):
            self.add_residuals(part.memories)

    def add_residuals(self, memories: Mapping[str, Tensor]) -> None:
        for key, total in self._totals.items():
            kind, _, name = key.partition("/")
            total += (residual_in(memories, name) if kind == "mark" else memories[key]).to(total.device)

    def means(self) -> Program[dict[str, Tensor]]:
        """Return the mean over old ranks of each residual; all ranks call it."""
        means = {}
        for key, total in self._totals.items():  # in the same order on all ranks
            means[key.removeprefix("mark/")] = (yield AllReduce(total)) / self.old
        return means

    def merged(self, source: RankState) -> Program[RankState]:
        """Return the part of this rank's source with the mean residuals; all ranks call it."""
        means = yield from self.means()
        part = for_world(self.pipeline, source, self.old, residuals_differ=False)
        if self.pipeline.exchanges_steps:
            return replace(part, memories=with_residuals(part.memories, means, part.figures["preview"]))
        return replace(part, memories={**part.memories, **means})
