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

from gradsieve.comm import lockstep, rounds
from gradsieve.comm.engine import Engine
from gradsieve.comm.ops import AllGather, AllReduce, AllToAll, Op
from gradsieve.comm.rounds import directly, has_rounds, in_rounds
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


def trained(rank: int, way: str) -> tuple[set[str], list[Tensor]]:
    carried, usual = set(), Engine.by_backend

    def watched(self: Engine, op: Op) -> Tensor:
        carried.add(type(op).__name__)
        return usual(self, op)

    run = Run(rank, Plan("exdyna"))
    with (
        mock.patch.object(rounds, "route", lambda op, *_: way if has_rounds(op) else "backend"),
        mock.patch.object(Engine, "by_backend", watched),
    ):
        for step in range(4):
            run.step(run.plan.gradients(step, rank))
        run.sync.verify()
    return carried, [p.detach().clone() for p in run.model.parameters()]


@pytest.mark.parametrize(("way", "message"), [("rounds", "Exchange"), ("direct", "AllToAll")])
def test_a_training_by_our_own_has_the_same_replicas(
    pool: Callable[[int], Ranks], way: str, message: str
) -> None:
    ranks = pool(WORLD).run(trained, way)
    assert all(carried == {message} for carried, _ in ranks)
    for _, parameters in ranks[1:]:
        assert all(torch.equal(one, other) for one, other in zip(parameters, ranks[0][1], strict=True))


def asked() -> Program[Tensor]:
    yield AllGather(torch.zeros(101))
    return (yield AllReduce(torch.zeros(101)))


def dies_in_a_round(rank: int) -> tuple[str, tuple[int, ...]]:
    engine, usual, begun = Engine(), Engine.by_backend, []
    engine.assume_links()

    def dying(self: Engine, op: Op) -> Tensor:
        begun.append(op)
        if rank == VICTIM and len(begun) == 5:  # the second of the sum's
            os._exit(3)
        return usual(self, op)

    with (
        mock.patch.object(rounds, "route", return_value="rounds"),
        mock.patch.object(Engine, "by_backend", dying),
        pytest.raises(PeerError) as seen,
    ):
        engine.run(asked(), "a test", CPU)
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
        assert re.search(r"AllReduce of float32 \(101,\) for a test failed", said), said
