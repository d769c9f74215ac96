"""Collectives in rounds of messages: what every rank is told, and the laws of all schemes on top of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradsieve.comm import lockstep
from gradsieve.comm.ops import AllGather, AllReduce, AllToAll, Meter, Op
from gradsieve.comm.rounds import directly, has_rounds, in_rounds
from gradsieve.testing.laws import check_replicated, check_round, check_same_states, same_bits
from gradsieve.testing.ranks import VirtualRanks
from gradsieve.types import Outcome, Program, by_way_of
from laws.cases import WORLDS, Case, cases, registered, schemes

ODD = [1, 3, 7, 31, 1009]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8]
Ask = Callable[[Tensor, int], Op]


def all_to_all(rows: Tensor, world: int) -> Op:
    ones = (1,) * world
    return AllToAll(rows.expand(world, -1).contiguous() + torch.arange(world)[:, None], ones, ones, even=True)


ASKS: dict[str, Ask] = {
    "gather": lambda own, world: AllGather(own.clone()),
    "sum": lambda own, world: AllReduce(own.clone()),
    "all-to-all": all_to_all,
}


def alone(op: Op) -> Program[Tensor]:
    return (yield op)


def own_tensors(world: int, n: int, dtype: torch.dtype, seed: int) -> list[Tensor]:
    source = torch.Generator().manual_seed(seed)
    whole = [torch.randint(0, 9, (n,), generator=source).to(dtype) for _ in range(world)]
    return (
        [own + torch.rand(n, generator=source).to(dtype) for own in whole]
        if dtype.is_floating_point
        else whole
    )


@pytest.mark.parametrize("name", ASKS)
@pytest.mark.parametrize("world", WORLDS)
def test_replies_are_those_of_the_op_for_every_number_of_ranks(name: str, world: int) -> None:
    check_replies(name, world, ODD[world % len(ODD)], DTYPES[world % len(DTYPES)], seed=world)


@pytest.mark.parametrize("name", ASKS)
@settings(max_examples=20)
@given(
    world=st.sampled_from(WORLDS),
    n=st.sampled_from(ODD) | st.integers(1, 500),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1000),
)
def test_replies_are_those_of_the_op(name: str, world: int, n: int, dtype: torch.dtype, seed: int) -> None:
    check_replies(name, world, n, dtype, seed)


def check_replies(name: str, world: int, n: int, dtype: torch.dtype, seed: int) -> None:
    owns = own_tensors(world, n, dtype, seed)
    meters = [Meter(rank, world) for rank in range(world)]
    replies = lockstep.run(
        [in_rounds(ASKS[name](own, world), r, world) for r, own in enumerate(owns)], meters
    )
    expected = lockstep.run([alone(ASKS[name](own, world)) for own in owns])
    log = (world - 1).bit_length()
    assert {meter.rounds for meter in meters} == {2 * log if name == "sum" else log}
    check_same(replies, expected, in_another_order=name == "sum" and dtype.is_floating_point)
    if name != "all-to-all":
        replies = lockstep.run(
            [directly(ASKS[name](own, world), rank, world) for rank, own in enumerate(owns)]
        )
        check_same(replies, expected, in_another_order=name == "sum" and dtype.is_floating_point)


def check_same(replies: list[Tensor], expected: list[Tensor], in_another_order: bool) -> None:
    for reply, other in zip(replies, expected, strict=True):
        assert (reply.shape, reply.dtype) == (other.shape, other.dtype)
        assert same_bits(reply, replies[0] if in_another_order else other)
        torch.testing.assert_close(reply, other)


@pytest.mark.parametrize("world", WORLDS)
def test_bytes_are_those_of_the_best_algorithm(world: int) -> None:
    """But for a row that is filled up: here none is."""
    for name, times in (("gather", world - 1), ("sum", 2 * (world - 1) / world)):
        meter, op = Meter(0, world), ASKS[name](torch.zeros(world * 5), world)
        lockstep.run([in_rounds(ASKS[name](torch.zeros(world * 5), world), r, world) for r in range(world)],
                     [meter, *(Meter(r, world) for r in range(1, world))])  # fmt: skip
        assert meter.moved == pytest.approx(times * op.tensor.numel() * 4)


class InRounds(VirtualRanks):
    """Every collective that can go in rounds does, whatever it costs; in every second step, directly."""

    def carried(self, program: Program[Outcome[Any]], rank: int) -> Program[Outcome[Any]]:
        def perform(op: Op) -> Program[Tensor]:
            if not has_rounds(op):
                return (yield op)
            straight = self.step % 2 and not isinstance(op, AllToAll)
            return (yield from (directly if straight else in_rounds)(op, rank, self.world))

        return by_way_of(program, perform)


class SummedFromOneself(VirtualRanks):
    """The twin: a rank adds up what it is told from its own part on, so that ranks differ in the last bit."""

    def carried(self, program: Program[Outcome[Any]], rank: int) -> Program[Outcome[Any]]:
        def perform(op: Op) -> Program[Tensor]:
            if not isinstance(op, AllReduce) or not has_rounds(op):
                return (yield op)
            every = yield from in_rounds(AllGather(op.tensor), rank, self.world)
            total = every[rank].clone()
            for ahead in range(1, self.world):
                total += every[(rank + ahead) % self.world]
            return total

        return by_way_of(program, perform)


def fleet(kind: type[VirtualRanks], name: str, case: Case) -> VirtualRanks:
    return kind(case.scheme(name), case.sizes, case.world, case.dtype)


@pytest.mark.parametrize("name", schemes(registered()))
@settings(max_examples=6)
@given(case=cases())
def test_laws_hold(name: str, case: Case) -> None:
    ranks = fleet(InRounds, name, case)
    for round_ in ranks.advance(case.source, 2):
        check_round(round_, case.source.exact)
    check_same_states(ranks.states)


@pytest.mark.parametrize("name", ["dense", "exdyna"])
def test_sums_in_an_order_of_ones_own_are_seen(name: str) -> None:
    case = Case("normal", 7, (501,), density=0.3, steps=3)
    check_all_replicated(fleet(InRounds, name, case), case)
    with pytest.raises(AssertionError, match="has another update"):
        check_all_replicated(fleet(SummedFromOneself, name, case), case)


def check_all_replicated(ranks: VirtualRanks, case: Case) -> None:
    for round_ in ranks.advance(case.source, case.steps):
        check_replicated(round_.outcomes)
