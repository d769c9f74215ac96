"""Every op of the vocabulary on gloo gives the replies that the lockstep driver gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from gradsieve.comm import lockstep
from gradsieve.comm.engine import Engine
from gradsieve.comm.ops import AllGather, AllReduce, AllToAll, Broadcast, Exchange, Op
from gradsieve.errors import DivergenceError
from gradsieve.types import Program
from multiproc.harness import Ranks

CPU = torch.device("cpu")
ROUNDS = 5
Asking = Callable[[int, int, int], Iterator[Op]]


def numbers(rank: int, round_: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    source = torch.Generator().manual_seed(round_ * 1009 + rank)
    return torch.randint(-50, 51, shape, generator=source).to(dtype)


def all_gather(rank: int, world: int, round_: int) -> Iterator[Op]:
    yield AllGather(numbers(rank, round_, 7))
    yield AllGather(numbers(rank, round_, 3, 4, dtype=torch.int32))
    yield AllGather(numbers(rank, round_, 4, 3, dtype=torch.float64).t())


def all_reduce(rank: int, world: int, round_: int) -> Iterator[Op]:
    for dtype in (torch.float32, torch.float64, torch.int64, torch.bfloat16, torch.float16):
        yield AllReduce(numbers(rank, round_, 6, dtype=dtype))
    yield AllReduce(numbers(rank, round_, 1001))
    yield AllReduce(numbers(rank, round_, 5, 2).t())


def broadcast(rank: int, world: int, round_: int) -> Iterator[Op]:
    for root in range(world):
        yield Broadcast(numbers(rank, round_, 5), root)


def all_to_all_uneven(rank: int, world: int, round_: int) -> Iterator[Op]:
    """Rank i sends (i + 2 j + round) % 4 rows to rank j: some of these are zero, to itself as well."""
    count = [[(sender + 2 * receiver + round_) % 4 for receiver in range(world)] for sender in range(world)]
    sends, receives = tuple(count[rank]), tuple(row[rank] for row in count)
    yield AllToAll(numbers(rank, round_, sum(sends)), sends, receives)
    yield AllToAll(numbers(rank, round_, sum(sends), 3, dtype=torch.int64), sends, receives)


def all_to_all_mostly_nothing(rank: int, world: int, round_: int) -> Iterator[Op]:
    nothing = (0,) * world
    yield AllToAll(torch.empty(0), nothing, nothing)
    only_last = (*nothing[1:], 2)  # every rank sends to the last one only
    yield AllToAll(numbers(rank, round_, 2), only_last, (2,) * world if rank == world - 1 else nothing)


def exchange(rank: int, world: int, round_: int) -> Iterator[Op]:
    """Around a ring by every distance, itself included, with lengths that differ between ranks."""
    for distance in range(world):
        to, source = (rank + distance) % world, (rank - distance) % world
        yield Exchange(numbers(rank, round_, 3 + rank), to, source, 3 + source)


def exchange_with_nothing_one_way(rank: int, world: int, round_: int) -> Iterator[Op]:
    """Even ranks have nothing to send; then nobody has."""
    to, source = (rank + 1) % world, (rank - 1) % world
    yield Exchange(numbers(rank, round_, 4 * (rank % 2)), to, source, 4 * (source % 2))
    yield Exchange(torch.empty(0), to, source, 0)


def empty(rank: int, world: int, round_: int) -> Iterator[Op]:
    yield AllGather(torch.empty(0))
    yield AllGather(torch.empty(2, 0))
    yield AllReduce(torch.empty(0))
    yield Broadcast(torch.empty(0), world - 1)


EVERY = [
    all_gather,
    all_reduce,
    broadcast,
    all_to_all_uneven,
    all_to_all_mostly_nothing,
    exchange,
    exchange_with_nothing_one_way,
    empty,
]


def replies(asking: Asking, rank: int, world: int, round_: int) -> Program[list[Tensor]]:
    """A program that keeps what it is answered."""
    kept = []
    for op in asking(rank, world, round_):
        reply = yield op
        kept.append(reply.clone())
    return kept


def on_gloo(rank: int, asking: Asking) -> list[list[Tensor]]:
    engine = Engine()
    assert engine.rank == rank
    rounds = range(ROUNDS)
    return [engine.run(replies(asking, rank, engine.world, i), "a test", CPU) for i in rounds]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("asking", EVERY, ids=lambda asking: asking.__name__)
def test_replies_are_those_of_the_lockstep_driver(
    pool: Callable[[int], Ranks], asking: Asking, world: int
) -> None:
    real = pool(world).run(on_gloo, asking)
    for round_ in range(ROUNDS):
        expected = lockstep.run([replies(asking, rank, world, round_) for rank in range(world)])
        assert any(expected), "the test asked for nothing"
        for rank in range(world):
            assert_same(real[rank][round_], expected[rank])


def assert_same(real: list[Tensor], expected: list[Tensor]) -> None:
    assert len(real) == len(expected)
    for one, other in zip(real, expected, strict=True):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert torch.equal(one, other)


def many_at_once(rank: int) -> list[list[list[Tensor]]]:
    """Programs of every kind queued before the first has ended."""
    engine = Engine()
    queued = [
        engine.submit(replies(asking, rank, engine.world, round_), "a test", CPU)
        for round_ in range(ROUNDS)
        for asking in EVERY
    ]
    return [future.result() for future in queued]


def test_programs_queued_at_once_run_in_order(four: Ranks) -> None:
    real = four.run(many_at_once)
    turns = [(round_, asking) for round_ in range(ROUNDS) for asking in EVERY]
    for turn, (round_, asking) in enumerate(turns):
        expected = lockstep.run([replies(asking, rank, 4, round_) for rank in range(4)])
        for rank in range(4):
            assert_same(real[rank][turn], expected[rank])


def one_breaks(rank: int) -> tuple[str, list[Tensor]]:
    engine = Engine()

    def breaks() -> Program[None]:
        yield AllReduce(torch.ones(3))
        raise DivergenceError("planted")  # as all errors of ours, on all ranks alike

    broken = engine.submit(breaks(), "a test", CPU)
    after = engine.submit(replies(all_reduce, rank, engine.world, 0), "a test", CPU)
    return repr(broken.exception()), after.result()


def test_an_error_of_all_ranks_goes_to_their_callers_and_the_next_program_runs(two: Ranks) -> None:
    expected = lockstep.run([replies(all_reduce, rank, 2, 0) for rank in range(2)])
    for rank, (error, after) in enumerate(two.run(one_breaks)):
        assert error == "DivergenceError('planted')"
        assert_same(after, expected[rank])
