"""Parameters that take no part in a step, on one rank or on all: nothing hangs and nothing is lost.

DDP leaves the gradient of a parameter alone which no rank used. What an exchange would put there is dropped.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import Tensor

from multiproc.harness import Ranks
from multiproc.training import Plan, Run, Seen, check_laws, usual

every_scheme = pytest.mark.parametrize("scheme", usual())

LEFT, RIGHT = (0, 1), (3, 4, 5)
"""Two branches of `Whole`, by place; the rest is always used."""


class Branching(Plan):
    def gradients(self, step: int, rank: int, micro: int = 0) -> list[Tensor | None]:
        """A rank goes left, right or both; every fifth step nobody goes left, every fifth nobody right."""
        gradients = super().gradients(step, rank, micro)
        left = step % 5 != 0 and (step + rank) % 3 != 0
        right = step % 5 != 1 and (step + rank) % 3 != 1
        without = (() if left else LEFT) + (() if right else RIGHT)
        return [None if place in without else gradient for place, gradient in enumerate(gradients)]


def branching(scheme: str) -> Plan:
    return Branching(scheme, steps=20, ddp={"find_unused_parameters": True})


def train(rank: int, plan: Plan) -> Seen:
    return Run(rank, plan).train().report()


@every_scheme
@pytest.mark.parametrize("world", [2, 4])
def test_branches_by_rank_and_step_lose_nothing(
    pool: Callable[[int], Ranks], scheme: str, world: int
) -> None:
    check_laws(pool(world).run(train, branching(scheme)))


class NeverUsed(Plan):
    def gradients(self, step: int, rank: int, micro: int = 0) -> list[Tensor | None]:
        gradients = super().gradients(step, rank, micro)
        return [None if place == 3 else gradient for place, gradient in enumerate(gradients)]


@every_scheme
def test_a_parameter_that_is_never_used_on_a_static_graph(two: Ranks, scheme: str) -> None:
    seen = two.run(train, NeverUsed(scheme, ddp={"static_graph": True}))
    check_laws(seen)
    assert not int(seen[0].parameters["tensors.3"].count_nonzero())
