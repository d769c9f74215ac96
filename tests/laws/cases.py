"""What Hypothesis draws: a scheme's surroundings, small enough to run in milliseconds."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from gradsieve.schemes import SCHEMES, make
from gradsieve.schemes.base import Scheme
from gradsieve.testing.gradients import EXACT, KINDS, Source
from gradsieve.testing.ranks import VirtualRanks

WORLDS = [*range(1, 10), 13, 16]
DENSITIES = [0.001, 0.01, 0.05, 0.1, 0.29, 0.5, 0.9]
LARGE = [4099, 16411, 65537, 100_000]


def registered() -> list[str]:
    """Every scheme that communicates, read at collection: a new one needs only its line in the registry."""
    return [name for name, kind in SCHEMES.items() if not kind.no_comm and not kind.whole_model]


def first(some: Iterable[Any], gate: Collection[Any]) -> list[Any]:
    """Return parameters of a test, of which the gate takes those in `gate` and the night all."""
    return [each if each in gate else pytest.param(each, marks=pytest.mark.nightly) for each in some]


def schemes(names: Iterable[str]) -> list[Any]:
    """Return parameters of a test: the schemes of the tools, which no training uses, are tried at night."""
    return first(names, {name for name in SCHEMES if SCHEMES[name].__module__.startswith("gradsieve.")})


def published() -> list[str]:
    """Published rules. They share code with ours: `test_published.py` holds them to all laws at once."""
    return [name for name, kind in SCHEMES.items() if kind.whole_model]


def lengths(world: int) -> list[int]:
    """Lengths at which partitions are empty, of one element, even or uneven."""
    return sorted({0, 1, 2, world - 1, world, world + 1, 2 * world, 31, 61, 127, 509, 1009})


@dataclass(frozen=True)
class Case:
    kind: str
    world: int
    sizes: tuple[int, ...]
    density: float = 0.05
    steps: int = 6
    seed: int = 0
    dtype: torch.dtype = torch.float32

    @property
    def source(self) -> Source:
        return Source(self.kind, self.sizes, self.seed, self.dtype)

    def scheme(self, name: str) -> Scheme[Any]:
        return make(name, self.density)

    def fleet(self, name: str) -> VirtualRanks:
        return VirtualRanks(self.scheme(name), self.sizes, self.world, self.dtype)


@st.composite
def cases(draw: st.DrawFn, *, exact: bool = False, buckets: int = 1) -> Case:
    world = draw(st.sampled_from(WORLDS))
    length = st.sampled_from(lengths(world)) | st.integers(0, 2000)
    if world <= 4 and buckets == 1:
        length |= st.sampled_from(LARGE)
    return Case(
        kind=draw(st.sampled_from(EXACT if exact else list(KINDS))),
        world=world,
        sizes=tuple(draw(st.lists(length, min_size=buckets, max_size=buckets))),
        density=draw(st.sampled_from(DENSITIES)),
        steps=draw(st.integers(2, 12)),
        seed=draw(st.integers(0, 10_000)),
        dtype=draw(st.sampled_from([torch.float32, torch.float64])),
    )
