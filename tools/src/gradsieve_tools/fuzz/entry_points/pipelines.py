"""Whole pipelines: what is piggybacked on an exchange (tags, probes, votes, seconds), and what is applied."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor

from gradsieve.pipeline.budget import Budget
from gradsieve.testing import GradientPipeline, StepPipeline, lockstep
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
_SHAPES = {"weight": (24, 10), "bias": (10,)}  # one unit for the scheme, one that is piggybacked


@dataclass
class Rank:
    pipeline: GradientPipeline | StepPipeline
    tensors: dict[str, Tensor]

    def move(self, source: torch.Generator) -> None:
        for tensor in self.tensors.values():
            tensor.copy_(torch.randn(tensor.shape, generator=source, dtype=tensor.dtype, device="cpu"))

    def complete(self) -> None:
        if isinstance(self.pipeline, StepPipeline):
            self.pipeline.finish(self.tensors)

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
    return Rank(pipeline, pipeline.own)


def steps(scheme: str, rank: int) -> Rank:
    pipeline = _steps(scheme, rank, WORLD)
    return Rank(pipeline, pipeline.own)


def _steps(scheme: str, rank: int, world: int) -> StepPipeline:
    return StepPipeline(parameters().items(), parse(scheme, 0.2), rank, world)


def gradients(scheme: str, rank: int, world: int = WORLD) -> Rank:
    pipeline = GradientPipeline(parameters().items(), parse(scheme, 0.2), rank, world)
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
        programs = [rank.pipeline.program(0, rank.tensors) for rank in ranks]
        programs[VICTIM] = overheard(programs[VICTIM], heard)
        lockstep.run(programs)
        for rank in ranks:
            rank.complete()
    return victim, heard


def _enter(victim: Rank, heard: list[Heard], number: int) -> Callable[[bytearray], None]:
    def enter(forged: bytearray) -> None:
        rank = deepcopy(victim)
        replayed(rank.pipeline.program(0, rank.tensors), heard, number, forged)
        rank.complete()
        rank.check()

    return enter
