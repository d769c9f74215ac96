"""Collectives in rounds on real processes: the replies, a training on them, and a rank that dies in one."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import Tensor

from gradsieve.comm import lockstep
from gradsieve.comm.c10d import Engine
from gradsieve.comm.ops import AllGather, AllReduce, AllToAll, Op
from gradsieve.comm.rounds import Rounds, directly, has_rounds, in_rounds
from gradsieve.errors import PeerError
from gradsieve.types import Program
from multiproc.harness import Ranks
from multiproc.training import Plan, Run

CPU = torch.device("cpu")
WORLD, VICTIM = 5, 3


def replies(rank: int, world: int) -> Program[list[Tensor]]:
    source = torch.Generator().manual_seed(rank)
    own, ones = torch.randn(101, generator=source), (1,) * world
    rows = torch.randint(0, 255, (world, 13), generator=source, dtype=torch.uint8)
    asked: list[Op] = [
        AllGather(own.clone()),
        AllReduce(own.clone()),
        AllReduce(torch.randn(2, 3, generator=source).t()),
        AllToAll(rows, ones, ones, even=True),
    ]
    kept = []
    for op in asked:
        kept.append((yield from in_rounds(op, rank, world)))
    for op in asked[:3]:
        kept.append((yield from directly(replace(op, tensor=own.clone()), rank, world)))
    return kept


def on_gloo(rank: int) -> list[Tensor]:
    engine = Engine()
    return engine.run(replies(rank, engine.world), "a test", CPU)


def test_replies_are_those_of_virtual_ranks(pool: Callable[[int], Ranks]) -> None:
    expected = lockstep.run([replies(rank, WORLD) for rank in range(WORLD)])
    for real, virtual in zip(pool(WORLD).run(on_gloo), expected, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(real, virtual, strict=True))


def trained(rank: int, way: str) -> tuple[int, list[Tensor]]:
    with mock.patch.object(Rounds, "chosen", lambda self, op: way if has_rounds(op) else "engine"):
        run = Run(rank, Plan("exdyna"))
        for step in range(4):
            run.step(run.plan.gradients(step, rank))
        run.sync.verify()
        return run.sync.metrics()["collectives"], [p.detach().clone() for p in run.model.parameters()]


@pytest.mark.parametrize(("way", "ops"), [("rounds", 9), ("direct", 3)])
def test_a_training_by_our_own_has_the_same_replicas(
    pool: Callable[[int], Ranks], way: str, ops: int
) -> None:
    """A gather in 3 rounds and a sum in 6, a unit; or one and two messages to everybody."""
    ranks = pool(WORLD).run(trained, way)
    assert {collectives % ops for collectives, _ in ranks} == {0}
    for _, parameters in ranks[1:]:
        assert all(torch.equal(one, other) for one, other in zip(parameters, ranks[0][1], strict=True))


def dies_in_a_round(rank: int) -> tuple[str, tuple[int, ...]]:
    engine, usual, begun = Engine(), Engine.perform, []

    def dying(self: Engine, op: Op) -> Tensor:
        begun.append(op)
        if rank == VICTIM and len(begun) == 5:  # the second of the sum's
            os._exit(3)
        return usual(self, op)

    with mock.patch.object(Engine, "perform", dying), pytest.raises(PeerError) as seen:
        engine.run(replies(rank, engine.world), "a test", CPU)
    return str(seen.value), seen.value.ranks


def test_who_dies_in_a_round_is_named_with_the_collective(pool: Callable[[int], Ranks]) -> None:
    ranks = pool(WORLD)
    answers = ranks.outcomes(dies_in_a_round, group_timeout=20.0)
    ranks.kill()
    assert answers[VICTIM].exit_code == 3
    for rank, answer in enumerate(answers):
        if rank == VICTIM:
            continue
        said, blamed = answer.value
        assert blamed == (VICTIM,), said
        assert re.search(r"Exchange of \w+ within All\w+ of \w+.* for a test failed", said), said
