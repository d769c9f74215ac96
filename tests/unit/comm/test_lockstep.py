"""Virtual ranks: every op's reply is right, and the rank that deviates is named."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gradsieve.comm.lockstep import run
from gradsieve.comm.ops import AllGather, AllReduce, AllToAll, Broadcast, Exchange, Op
from gradsieve.errors import MismatchError
from gradsieve.types import Program


def ask(*ops: Op) -> Program[list[Tensor]]:
    replies = []
    for op in ops:
        replies.append((yield op).clone())
    return replies


def replies_to(ops: Sequence[Op]) -> list[Tensor]:
    """The reply of each rank to its op."""
    return [replies[0] for replies in run([ask(op) for op in ops])]


def vector(*numbers: float) -> Tensor:
    return torch.tensor(numbers)


@pytest.mark.parametrize("world", [1, 2, 5])
def test_all_gather_stacks_in_rank_order(world: int) -> None:
    parts = [torch.full((2, 3), float(rank)) for rank in range(world)]
    for reply in replies_to([AllGather(part.clone()) for part in parts]):
        assert torch.equal(reply, torch.stack(parts))


@pytest.mark.parametrize("world", [1, 2, 5])
def test_all_reduce_is_the_sum_on_every_rank(world: int) -> None:
    parts = [vector(rank, 1.0) for rank in range(world)]
    replies = replies_to([AllReduce(part) for part in parts])
    expected = vector(sum(range(world)), world)
    assert all(torch.equal(reply, expected) for reply in replies)


def test_all_reduce_adds_in_rank_order() -> None:
    assert replies_to([AllReduce(vector(x)) for x in (1e8, 1.0, -1e8)])[0].item() == 0.0
    assert replies_to([AllReduce(vector(x)) for x in (1e8, -1e8, 1.0)])[0].item() == 1.0


@pytest.mark.parametrize("root", [0, 2])
def test_broadcast_gives_everybody_what_the_root_has(root: int) -> None:
    parts = [vector(rank, -rank) for rank in range(3)]
    for reply in replies_to([Broadcast(part, root) for part in parts]):
        assert torch.equal(reply, vector(root, -root))


@given(table=st.lists(st.lists(st.integers(0, 3), min_size=4, max_size=4), min_size=4, max_size=4))
def test_all_to_all_delivers_uneven_rows_in_rank_order(table: list[list[int]]) -> None:
    ranks = range(4)
    ops = []
    for sender in ranks:
        rows = [
            [100 * sender + 10 * receiver + i] * 2
            for receiver in ranks
            for i in range(table[sender][receiver])
        ]
        tensor = torch.tensor(rows, dtype=torch.int64).reshape(-1, 2)
        ops.append(AllToAll(tensor, tuple(table[sender]), tuple(table[other][sender] for other in ranks)))
    for receiver, reply in enumerate(replies_to(ops)):
        expected = [
            100 * sender + 10 * receiver + i for sender in ranks for i in range(table[sender][receiver])
        ]
        assert reply[:, 0].tolist() == reply[:, 1].tolist() == expected


@pytest.mark.parametrize("shift", [0, 1, 2])
def test_exchange_delivers_to_the_peer_named(shift: int) -> None:
    world = 3
    ops = [
        Exchange(torch.full((rank + 1,), rank), (rank + shift) % world, (rank - shift) % world, 1)
        for rank in range(world)
    ]
    ops = [Exchange(op.tensor, op.to, op.source, op.source + 1) for op in ops]
    for rank, reply in enumerate(replies_to(ops)):
        source = (rank - shift) % world
        assert reply.tolist() == [source] * (source + 1)


def handed_over(rank: int) -> list[Op]:
    """One op of each kind, of three ranks."""
    ones, number = (1, 1, 1), torch.tensor([rank, rank, rank])
    return [
        AllReduce(number.float()),
        AllGather(number.int()),
        Broadcast(number.clone(), 1),
        AllToAll(number.to(torch.uint8), ones, ones, even=True),
        Exchange(number.double(), (rank + 1) % 3, (rank - 1) % 3, 3),
    ]


@pytest.mark.parametrize("place", range(5))
def test_what_was_handed_over_is_spoilt_on_some_ranks_and_as_it_was_on_others(place: int) -> None:
    """Engines do the one or the other: a scheme that reads it has to be caught, whichever it relies on."""

    def careless(rank: int) -> Program[tuple[Tensor, bool]]:
        op = handed_over(rank)[place]
        before = op.tensor.clone()
        reply = yield op
        return reply, torch.equal(op.tensor, before)

    replies, kept = zip(*run([careless(rank) for rank in range(3)]), strict=True)
    assert kept == (False, True, False)
    expected = [torch.full((3,), 3.0), torch.arange(3).int().repeat(3, 1).T, torch.ones(3).long()]
    expected += [torch.arange(3).to(torch.uint8), torch.full((3,), 2.0).double()]
    assert torch.equal(replies[0], expected[place])


DEVIATIONS: list[tuple[Any, Any, str]] = [
    (AllReduce(vector(1.0)), AllGather(vector(1.0)), r"rank 2 asked for AllGather .* asked for AllReduce"),
    (AllReduce(vector(1.0)), AllReduce(vector(1.0, 2.0)), r"rank 2 asked for AllReduce of float32 \(2,\)"),
    (AllGather(vector(1.0)), AllGather(vector(1.0).double()), r"rank 2 asked for AllGather of float64"),
    (Broadcast(vector(1.0), 0), Broadcast(vector(1.0), 1), r"rank 2 asked for Broadcast .* from rank 1;"),
]


@pytest.mark.parametrize(("usual", "odd", "message"), DEVIATIONS)
def test_the_rank_that_asks_for_something_else_is_named(usual: Op, odd: Op, message: str) -> None:
    with pytest.raises(MismatchError, match=message):
        replies_to([usual, usual, odd, usual])


def test_the_rank_that_ends_early_is_named() -> None:
    with pytest.raises(
        MismatchError, match=r"rank 1 asked for nothing more; the other ranks asked for AllRed"
    ):
        run([ask(AllReduce(vector(1.0))), ask(), ask(AllReduce(vector(1.0)))])


def test_all_to_all_names_the_pair_whose_counts_differ() -> None:
    ops = [AllToAll(torch.zeros(3), (1, 2), (1, 0)), AllToAll(torch.zeros(1), (0, 1), (1, 1))]
    with pytest.raises(MismatchError, match=r"rank 0 sends 2 rows to rank 1, which expects 1"):
        replies_to(ops)


@pytest.mark.parametrize(
    "odd",
    [
        AllToAll(torch.zeros(3), (1, 1), (1, 1)),
        AllToAll(torch.zeros(1), (1,), (1, 1)),
        AllToAll(torch.zeros(2), (1, 1), (1, 1, 0)),
    ],
)
def test_all_to_all_names_the_rank_whose_counts_do_not_add_up(odd: AllToAll) -> None:
    with pytest.raises(MismatchError, match=r"rank 1 announces"):
        replies_to([AllToAll(torch.zeros(2), (1, 1), (1, 1)), odd])


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        (Exchange(vector(1.0), 1, 1, 1), r"rank 0 expects 1 elements from rank 1, which sends 1 to rank 1"),
        (
            Exchange(vector(1.0, 2.0), 0, 0, 1),
            r"rank 0 expects 1 elements from rank 1, which sends 2 to rank 0",
        ),
        (Exchange(vector(1.0), 0, 0, 3), r"rank 1 expects 3 elements from rank 0, which sends 1 to rank 1"),
        (Exchange(vector(1.0), 0, 2, 1), r"rank 1 names a peer outside 0\.\.1"),
        (Exchange(vector(1.0), 0, -2, 1), r"rank 1 names a peer outside 0\.\.1"),
        (Exchange(vector(1.0), 7, 0, 1), r"rank [01] (names a peer outside|expects 1 elements from rank 1)"),
    ],
)
def test_exchange_names_the_rank_whose_pairing_is_wrong(odd: Exchange, message: str) -> None:
    with pytest.raises(MismatchError, match=message):
        replies_to([Exchange(vector(1.0), 1, 1, 1), odd])
