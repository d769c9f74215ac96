"""Runs a scheme as the pipeline does: P virtual ranks, residuals carried, all buckets settled together.

What a step did is kept as a `Round`, for the functions in `checks.py` to look at before it is committed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradsieve.comm import lockstep
from gradsieve.schemes.base import Scheme
from gradsieve.types import Ctx, Outcome, Program

Gradients = Callable[[int, int, int], Tensor]
"""The gradient of (step, rank, bucket)."""


@dataclass(frozen=True)
class Round:
    """One exchange of one bucket, before commit. Every list is in rank order."""

    step: int
    bucket: int
    accs: list[Tensor]
    accs_before: list[Tensor]
    states: list[Any]
    states_before: list[Any]
    outcomes: list[Outcome[Any]]


class Fleet:
    """P ranks that train together. `states` and `residuals` are indexed by rank, then by bucket."""

    def __init__(
        self, scheme: Scheme[Any], sizes: Sequence[int], world: int, dtype: torch.dtype = torch.float32
    ) -> None:
        self.scheme, self.sizes, self.world = scheme, list(sizes), world
        self.states: list[list[Any]] = [[scheme.begin(n, world) for n in sizes] for _ in range(world)]
        self.residuals = [[torch.zeros(n, dtype=dtype, device="cpu") for n in sizes] for _ in range(world)]
        self.step = 0

    def advance(self, gradients: Gradients, steps: int) -> Iterator[Round]:
        """The rounds of the next steps; a step is committed when its last round has been looked at."""
        for _ in range(steps):
            rounds = [self._exchange(gradients, bucket) for bucket in range(len(self.sizes))]
            yield from rounds
            self._commit(rounds)

    def _exchange(self, gradients: Gradients, bucket: int) -> Round:
        ranks = range(self.world)
        accs = [self.residuals[rank][bucket] + gradients(self.step, rank, bucket) for rank in ranks]
        states = [self.states[rank][bucket] for rank in ranks]
        before = [acc.clone() for acc in accs], deepcopy(states)
        programs = [
            self.carried(
                self.scheme.exchange(accs[rank], states[rank], Ctx(rank, self.world, self.step)), rank
            )
            for rank in ranks
        ]
        return Round(self.step, bucket, accs, before[0], states, before[1], lockstep.run(programs))

    def carried(self, program: Program[Outcome[Any]], rank: int) -> Program[Outcome[Any]]:
        """For fleets whose ops are carried in another way."""
        return program

    def _commit(self, rounds: list[Round]) -> None:
        for rank in range(self.world):
            for bucket, round_ in enumerate(rounds):
                round_.outcomes[rank].spent.subtract_from(round_.accs[rank])
                self.residuals[rank][bucket] = round_.accs[rank]
            self.states[rank] = self.scheme.settle([round_.outcomes[rank].state for round_ in rounds])
        self.step += 1

    def rebuild(self, sizes: Sequence[int]) -> None:
        """Other buckets from now on, as after DDP's first iteration: residuals follow their elements."""
        for rank in range(self.world):
            self.residuals[rank] = list(torch.cat(self.residuals[rank]).split(list(sizes)))
            previous = self.states[rank][0]
            self.states[rank] = [self.scheme.begin(n, self.world, previous) for n in sizes]
        self.sizes = list(sizes)
