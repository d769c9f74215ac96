"""The words for an op are equal exactly where ranks must agree; costs are worked out by hand."""

from __future__ import annotations

import pytest
import torch

from gradsieve.comm.ops import AllGather, AllReduce, AllToAll, Broadcast, Exchange, Meter, Op, describe

A, B, LONG, WIDE = torch.zeros(3), torch.ones(3), torch.zeros(4), torch.zeros(3).double()

SAME: list[tuple[Op, Op]] = [
    (AllGather(A), AllGather(B)),
    (AllReduce(A), AllReduce(B)),
    (Broadcast(A, 1), Broadcast(B, 1)),
    (AllToAll(A, (3, 0), (1, 2)), AllToAll(LONG, (2, 2), (0, 0))),
    (Exchange(A, 1, 1, 2), Exchange(LONG, 0, 0, 3)),
]
DIFFERENT: list[tuple[Op, Op]] = [
    (AllGather(A), AllReduce(A)),
    (AllGather(A), AllGather(LONG)),
    (AllGather(A), AllGather(WIDE)),
    (AllReduce(A), AllReduce(A.view(3, 1))),
    (Broadcast(A, 1), Broadcast(A, 2)),
    (AllToAll(A, (3,), (3,)), AllToAll(WIDE, (3,), (3,))),
    (Exchange(A, 1, 1, 3), Exchange(WIDE, 1, 1, 3)),
    (AllToAll(A, (3,), (3,), even=True), AllToAll(A, (3,), (3,))),
    (AllToAll(A, (3,), (3,), even=True), AllToAll(LONG, (4,), (4,), even=True)),
]


@pytest.mark.parametrize(("left", "right"), SAME)
def test_ops_that_may_meet_are_described_alike(left: Op, right: Op) -> None:
    assert describe(left) == describe(right)


@pytest.mark.parametrize(("left", "right"), DIFFERENT)
def test_ops_that_must_not_meet_are_described_apart(left: Op, right: Op) -> None:
    assert describe(left) != describe(right)


FIVE = torch.zeros(5)  # 20 bytes
ROWS = torch.zeros(6, 2)  # 6 rows of 8 bytes
NO_ROWS = torch.zeros(0, 2)
WIDE = torch.zeros(3, dtype=torch.float64)  # 24 bytes

BY_HAND: list[tuple[Op, int, int, float, float, int]] = [
    # op, rank, world, bytes sent, bytes received, rounds
    (AllGather(FIVE), 0, 4, 60, 60, 2),
    (AllGather(FIVE), 3, 5, 80, 80, 3),
    (AllGather(FIVE), 0, 1, 0, 0, 0),
    (AllReduce(FIVE), 1, 4, 30, 30, 4),
    (AllReduce(FIVE), 1, 5, 32, 32, 6),
    (AllReduce(WIDE), 0, 2, 24, 24, 2),
    (AllReduce(FIVE), 0, 1, 0, 0, 0),
    (Broadcast(FIVE, 2), 2, 8, 60, 0, 3),
    (Broadcast(FIVE, 2), 0, 8, 20, 20, 3),  # place 6 of the tree: one child
    (Broadcast(FIVE, 2), 6, 8, 40, 20, 3),  # place 4: two
    (Broadcast(FIVE, 0), 4, 6, 20, 20, 3),  # place 4 of six: one
    (Broadcast(FIVE, 0), 5, 6, 0, 20, 3),
    (Broadcast(FIVE, 0), 0, 1, 0, 0, 0),
    (AllToAll(ROWS, (1, 2, 3), (4, 5, 6)), 1, 3, 32, 80, 2),
    (AllToAll(NO_ROWS, (0, 0, 0), (4, 0, 6)), 1, 3, 0, 80, 2),
    (AllToAll(FIVE, (5,), (5,)), 0, 1, 0, 0, 0),
    (Exchange(FIVE, 1, 3, 7), 0, 4, 20, 28, 1),
    (Exchange(FIVE, 0, 0, 5), 0, 4, 0, 0, 0),
]


@pytest.mark.parametrize(("op", "rank", "world", "sent", "received", "rounds"), BY_HAND)
def test_figures_agree_with_those_worked_out_by_hand(
    op: Op, rank: int, world: int, sent: float, received: float, rounds: int
) -> None:
    meter = Meter(rank, world)
    meter.count(op)
    assert (meter.sent, meter.received, meter.rounds) == (sent, received, rounds)
    assert meter.collectives == 1
    assert meter.moved == max(sent, received)
