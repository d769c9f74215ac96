"""Whole pipelines: what is piggybacked on an exchange (tags, probes, votes, seconds), and what is applied."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor

from gradsieve.pipeline.budget import Budget
from gradsieve.pipeline.exchange_settings import Gradients, Steps
from gradsieve.testing import GradientPipeline, Pending, Pipeline, StepPipeline, lockstep
from gradsieve_tools.fuzz.entry_points.entry_point import EntryPoint
from gradsieve_tools.fuzz.entry_points.exchanges import (
    VICTIM,
    WORLD,
    Heard,
    as_bytes,
    liars_part,
    overheard,
    replayed,
)
from gradsieve_tools.specs import parse

_STEPS = 3  # valid steps before the attack
_SHAPES = {"weight": (24, 10), "bias": (10,)}  # both in one unit


@dataclass
class Rank:
    pipeline: Pipeline
    tensors: dict[str, Tensor]

    def move(self, source: torch.Generator) -> None:
        for tensor in self.tensors.values():
            tensor.copy_(torch.randn(tensor.shape, generator=source, dtype=tensor.dtype, device="cpu"))

    def begin(self) -> Pending:
        return self.pipeline.begin(gradients=self.tensors)

    def check(self) -> None:
        for name, part in self.pipeline.memories().items():
            if not bool(part.isfinite().all()):
                raise AssertionError(f"{name} is not finite")
        figures = torch.tensor(list(self.pipeline.figures().values()), dtype=torch.float64, device="cpu")
        if not bool(figures.isfinite().all()):
            raise AssertionError(f"figures are not finite: {self.pipeline.figures()}")


def entries() -> Iterator[EntryPoint]:
    for name, scheme, build in (
        ("steps of stripes with a budget", "stripes", with_budget),
        ("steps of exdyna", "exdyna", steps),
        ("gradients of topk", "topk", gradients),
        ("gradients of exdyna", "exdyna", gradients),
        ("gradients of stripes", "stripes", gradients),
    ):
        victim, heard = trained([build(scheme, rank) for rank in range(WORLD)])
        for number, each in enumerate(heard):
            frame = liars_part(each)
            if frame is not None and frame.numel():
                honest = (as_bytes(frame),)
                title = f"{name}, {type(each.op).__name__} {number}"
                yield EntryPoint(title, honest, (WORLD, _STEPS, 240), _enter(victim, heard, number))


def with_budget(scheme: str, rank: int, world: int = WORLD) -> Rank:
    pipeline = _steps(scheme, rank, world)
    pipeline.budget = Budget(0.75)
    return Rank(pipeline, pipeline.models.own)


def steps(scheme: str, rank: int) -> Rank:
    pipeline = _steps(scheme, rank, WORLD)
    return Rank(pipeline, pipeline.models.own)


def _steps(scheme: str, rank: int, world: int) -> StepPipeline:
    return StepPipeline(parameters(), (), parse(scheme, 0.2), Steps(small=0), rank, world)


def gradients(scheme: str, rank: int, world: int = WORLD) -> Rank:
    pipeline = GradientPipeline(parameters(), (), parse(scheme, 0.2), Gradients(small=0), rank, world)
    return Rank(pipeline, {name: tensor.flatten() for name, tensor in parameters().items()})


def parameters() -> dict[str, Tensor]:
    return {name: torch.zeros(shape, dtype=torch.float32, device="cpu") for name, shape in _SHAPES.items()}


def trained(ranks: list[Rank]) -> tuple[Rank, list[Heard]]:
    """The victim before the last step, and what it was sent in it."""
    source = torch.Generator(device="cpu").manual_seed(11)
    for _ in range(_STEPS + 1):
        for rank in ranks:
            rank.move(source)
        victim, heard = deepcopy(ranks[VICTIM]), []  # type: Rank, list[Heard]
        begun = [rank.begin() for rank in ranks]
        programs = [rank.pipeline.program(own, 0) for rank, own in zip(ranks, begun, strict=True)]
        programs[VICTIM] = overheard(programs[VICTIM], heard)
        lockstep.run(programs)
        for rank, own in zip(ranks, begun, strict=True):
            rank.pipeline.finish(own)
    return victim, heard


def _enter(victim: Rank, heard: list[Heard], number: int) -> Callable[[bytearray], None]:
    def enter(forged: bytearray) -> None:
        rank = deepcopy(victim)
        pending = rank.begin()
        replayed(rank.pipeline.program(pending, 0), heard, number, forged)
        rank.pipeline.finish(pending)
        rank.check()

    return enter
