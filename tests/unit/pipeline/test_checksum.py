"""What was sent is what arrived; one changed bit anywhere, and all ranks raise."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import pytest
import torch
from torch import Tensor

from gradsieve.comm import lockstep
from gradsieve.comm.ops import AllGather, AllReduce, AllToAll, Broadcast, Exchange, Meter, Op
from gradsieve.errors import Malformed
from gradsieve.pipeline.frame import CHECKSUM_WORDS, Checksum, Frame, Timeline, message_hash
from gradsieve.types import Program, by_way_of

WORLD = 3


def ops(rank: int) -> Program[None]:
    """One of each form, odd lengths and types among them."""
    chance = torch.Generator().manual_seed(rank)
    yield AllGather(torch.randint(0, 255, (13,), dtype=torch.uint8, generator=chance))
    counts = [[1, 2, 3], [0, 4, 1], [5, 0, 2]]
    received = tuple(row[rank] for row in counts)
    rows = torch.randn(sum(counts[rank]), 5, generator=chance)
    yield AllToAll(rows, tuple(counts[rank]), received)
    sizes = [3, 0, 7]
    source = (rank - 1) % WORLD
    sent = torch.randint(0, 1 << 40, (sizes[rank],), generator=chance)
    yield Exchange(sent, (rank + 1) % WORLD, source, sizes[source])
    yield Broadcast(torch.randn(4, generator=chance, dtype=torch.float64), 1)


def exchange(rank: int) -> Program[None]:
    yield from ops(rank)
    yield AllReduce(torch.zeros(4))


def framed(program: Program[None], checksum: Checksum, rank: int) -> Program[Tensor]:
    """The sums of the checksum's words."""
    frame = Frame(program, torch.zeros(CHECKSUM_WORDS), checksum, Meter(rank, WORLD), Timeline())
    return (yield from frame.run())[1]


def damaged(program: Program[Tensor], op_number: int) -> Program[Tensor]:
    """Below the ledger: one bit of what this rank sends in one op."""
    number = count()

    def perform(op: Op) -> Program[Tensor]:
        if next(number) == op_number:
            content = op.tensor.clone()
            content.view(-1).view(torch.uint8)[-1] ^= 64
            op = replace(op, tensor=content)
        return (yield op)

    return by_way_of(program, perform)


def sums(damage: tuple[int, int] | None, steps: int = 1) -> list[Tensor]:
    ledgers = [Checksum(rank, WORLD) for rank in range(WORLD)]
    for _ in range(steps):
        programs = [framed(exchange(rank), checksum, rank) for rank, checksum in enumerate(ledgers)]
        if damage is not None:
            programs[damage[0]] = damaged(programs[damage[0]], damage[1])
        heard = lockstep.run(programs)
    for checksum, each in zip(ledgers, heard, strict=True):
        checksum.check(each.tolist(), 7)
    return heard


def test_undamaged_messages_add_up_to_nothing() -> None:
    sums(None, steps=3)


@pytest.mark.parametrize(
    "damage",
    [(rank, op) for rank in range(WORLD) for op in range(4) if (rank, op) not in ((1, 2), (0, 3), (2, 3))],
)
def test_one_changed_bit_is_seen(damage: tuple[int, int]) -> None:
    with pytest.raises(Malformed, match=r"step 7: what arrived .* is not what was sent"):
        sums(damage)


def test_messages_behind_the_words_are_told_of_in_the_next_exchange() -> None:
    def late(rank: int) -> Program[None]:
        yield AllReduce(torch.zeros(3))
        yield AllGather(torch.ones(5) * rank)

    ledgers = [Checksum(rank, WORLD) for rank in range(WORLD)]
    for is_seen in (False, True):
        programs = [framed(late(rank), checksum, rank) for rank, checksum in enumerate(ledgers)]
        programs[1] = damaged(programs[1], 1)
        heard = lockstep.run(programs)
        if is_seen:
            with pytest.raises(Malformed):
                ledgers[0].check(heard[0].tolist(), 1)
        else:
            ledgers[0].check(heard[0].tolist(), 0)


@pytest.mark.parametrize(("shape", "row"), [((3, 21), 21), ((1, 2000), 2000), ((40, 3), 3)])
def test_every_bit_counts(shape: tuple[int, int], row: int) -> None:
    octets = torch.randint(0, 255, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    flat, usual = octets.view(-1), int(message_hash(octets, row))
    for bit in range(0, 8 * flat.numel(), 1 if flat.numel() < 200 else 37):
        flat[bit // 8] ^= 1 << bit % 8
        assert (int(message_hash(octets, row)) - usual) % (1 << 24), bit
        flat[bit // 8] ^= 1 << bit % 8


def test_a_long_message_hashes_as_its_rows_do() -> None:
    rows = torch.randn(7, 30_001, generator=torch.Generator().manual_seed(1))
    row = rows[0].numel() * 4
    assert int(message_hash(rows, row)) == sum(int(message_hash(each, row)) for each in rows)
