"""What released code chose (by `scripts/record_released.py`), and what our `-paper` schemes choose."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gradsieve.schemes.base import Scheme
from gradsieve.schemes.papers.deft import DeftPaper
from gradsieve.schemes.papers.exdyna import ExDynaPaper
from gradsieve.schemes.papers.micro import MicroPaper
from gradsieve.testing.ranks import Round, VirtualRanks
from papers.gradients import Gradients

STEPS = 250
TRACES = Path(__file__).parents[1] / "data" / "released"
Step = tuple[list[int], str]
"""How many elements each rank selected, and a digest of the indices that all ranks exchanged."""


@dataclass(frozen=True)
class Released:
    scheme: Scheme[Any]
    gradients: Gradients
    tensors: tuple[int, ...]

    def with_settings(self, **settings: Any) -> Released:
        return replace(self, scheme=replace(self.scheme, **settings))

    def gradient(self, step: int, rank: int) -> torch.Tensor:
        return torch.from_numpy(self.gradients(step, rank)).float()

    def digest(self) -> str:
        """Of the gradients of all ranks in the first and the last step."""
        ranks = range(self.gradients.world)
        return digest([self.gradient(step, rank).numpy() for step in (0, STEPS - 1) for rank in ranks])

    def steps(self) -> Iterator[Step]:
        """What our scheme chooses."""
        n, world = self.gradients.n, self.gradients.world
        fleet = VirtualRanks(self.scheme, [n], world, torch.float32)
        fleet.states = [[self.scheme.init_state(self.tensors, world)] for _ in range(world)]
        for round_ in fleet.advance(lambda step, rank, _: self.gradient(step, rank), STEPS):
            yield self._counts(round_), digest([round_.outcomes[0].update.listed().numpy()])

    def _counts(self, round_: Round) -> list[int]:
        """DEFT's state keeps the longest and the sum."""
        state, step, world = round_.outcomes[0].state, round_.step, len(round_.outcomes)
        if isinstance(self.scheme, DeftPaper):
            return [state.longest, state.rows]
        counts: list[int] = state.load.roll(-(step % world)).tolist()
        return counts


RELEASED = {
    "exdyna": Released(
        ExDynaPaper(density=0.01),
        Gradients(34_003, 4, scale=0.0005, swing=0.3, hot=200, heat=100.0, grid=2.0**-40),
        (9_000, 500, 17_003, 7_500),
    ),
    "micro": Released(
        MicroPaper(density=0.02),
        Gradients(5_003, 4, scale=0.005, swing=0.3, grid=2.0**-40),
        (900, 50, 3_000, 1_053),
    ),
    "deft": Released(
        DeftPaper(density=0.05),
        Gradients(3_122, 4, hot=960, grid=2.0**-40),
        (900, 50, 300, 7, 1, 1_300, 64, 500),
    ),
}


def digest(arrays: list[Any]) -> str:
    found = blake2b(digest_size=8)
    for array in arrays:
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()


@cache
def recorded(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((TRACES / f"{name}.json").read_text())
    return found


def check_same(name: str, case: Released) -> None:
    """Every step chose what the released code chose."""
    wanted = recorded(name)["steps"]
    assert len(wanted) == STEPS
    for step, ((counts, indices), (their_counts, theirs)) in enumerate(
        zip(case.steps(), wanted, strict=True)
    ):
        mine = [max(their_counts), sum(their_counts)] if name == "deft" else their_counts
        assert counts == mine, f"step {step}: other counts"
        assert indices == theirs, f"step {step}: other indices"
