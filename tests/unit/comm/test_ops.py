"""The words for an op: equal exactly where ranks must agree."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest
import torch

from gradsieve.comm.ops import AllGather, AllReduce, AllToAll, Broadcast, Exchange, Op, describe

A, B, LONG, WIDE = torch.zeros(3), torch.ones(3), torch.zeros(4), torch.zeros(3).double()

SAME: list[tuple[Op, Op]] = [
    (AllGather(A), AllGather(B)),
    (AllReduce(A), AllReduce(B)),
    (Broadcast(A, 1), Broadcast(B, 1)),
    (AllToAll(A, (3, 0), (1, 2)), AllToAll(LONG, (2, 2), (0, 0))),
    (Exchange(A, 1, 1, 2), Exchange(LONG, 0, 0, 3)),
    (Exchange(A, 1, 1, 2, "a sum"), Exchange(LONG, 0, 0, 3, "a sum")),
]
DIFFERENT: list[tuple[Op, Op]] = [
    (AllGather(A), AllReduce(A)),
    (AllGather(A), AllGather(LONG)),
    (AllGather(A), AllGather(WIDE)),
    (AllReduce(A), AllReduce(A.view(3, 1))),
    (Broadcast(A, 1), Broadcast(A, 2)),
    (AllToAll(A, (3,), (3,)), AllToAll(WIDE, (3,), (3,))),
    (Exchange(A, 1, 1, 3), Exchange(WIDE, 1, 1, 3)),
    (Exchange(A, 1, 1, 3, "a sum"), Exchange(A, 1, 1, 3)),
    (AllToAll(A, (3,), (3,), even=True), AllToAll(A, (3,), (3,))),
    (AllToAll(A, (3,), (3,), even=True), AllToAll(LONG, (4,), (4,), even=True)),
]


@pytest.mark.parametrize(("left", "right"), SAME)
def test_ops_that_may_meet_are_described_alike(left: Op, right: Op) -> None:
    assert describe(left) == describe(right)


@pytest.mark.parametrize(("left", "right"), DIFFERENT)
def test_ops_that_must_not_meet_are_described_apart(left: Op, right: Op) -> None:
    assert describe(left) != describe(right)


def test_the_words_say_what_it_is() -> None:
    assert describe(AllGather(A)) == "AllGather of float32 (3,)"
    assert describe(Broadcast(A.int(), 2)) == "Broadcast of int32 (3,) from rank 2"


def test_an_op_cannot_be_changed_after_it_was_made() -> None:
    with pytest.raises(FrozenInstanceError):
        AllGather(A).tensor = B  # type: ignore[misc]
