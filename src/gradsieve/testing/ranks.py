"""Virtual ranks run a scheme as the pipeline does, P of them in one process.

Each rank has its own residual; the states of all buckets advance together. A step is kept as `Round`s, which
the functions of `laws.py` examine before it is committed.
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

# The gradient of (step, rank, bucket).
Gradients = Callable[[int, int, int], Tensor]


@dataclass(frozen=True)
class Round:
    """One exchange of one bucket before it is committed; lists are in rank order."""

    step: int
    bucket: int
    accs: list[Tensor]
    accs_before: list[Tensor]
    states: list[Any]
    states_before: list[Any]
    outcomes: list[Outcome[Any]]


class VirtualRanks:
    """P ranks that train together. `states` and `residuals` are indexed by rank, then by bucket."""

    def __init__(
        self, scheme: Scheme[Any], sizes: Sequence[int], world: int, dtype: torch.dtype = torch.float32
    ) -> None:
        self.scheme, self.sizes, self.world = scheme, list(sizes), world
        self.states: list[list[Any]] = [[scheme.begin(n, world) for n in sizes] for _ in range(world)]
        self.residuals = [[torch.zeros(n, dtype=dtype, device="cpu") for n in sizes] for _ in range(world)]
        self.step = 0

    def advance(self, gradients: Gradients, steps: int) -> Iterator[Round]:
        """Yields the rounds of the next steps. A step is committed after its last round was consumed."""
        for _ in range(steps):
            rounds = [self._exchange(gradients, bucket) for bucket in range(len(self.sizes))]
            yield from rounds
            self._commit(rounds)

    def rebuild(self, sizes: Sequence[int]) -> None:
        """Changes the buckets, as DDP does after its first iteration: residuals follow their elements."""
        for rank in range(self.world):
            self.residuals[rank] = list(torch.split(torch.cat(self.residuals[rank]), list(sizes)))
            previous = self.states[rank][0]
            self.states[rank] = [self.scheme.begin(n, self.world, previous) for n in sizes]
        self.sizes = list(sizes)

    def carried(self, program: Program[Outcome[Any]], rank: int) -> Program[Outcome[Any]]:
        """Subclasses override this to carry ops in another way."""
        return program

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

    def _commit(self, rounds: list[Round]) -> None:
        for rank in range(self.world):
            for bucket, round_ in enumerate(rounds):
                round_.outcomes[rank].spent.subtract_from(round_.accs[rank])
                self.residuals[rank][bucket] = round_.accs[rank]
            self.states[rank] = self.scheme.next_states([round_.outcomes[rank].state for round_ in rounds])
        self.step += 1
