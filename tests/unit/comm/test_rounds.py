"""Which collectives go in rounds, and what that costs at 1,024 ranks."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor

from gradsieve.comm import lockstep
from gradsieve.comm.links import Links, nominal
from gradsieve.comm.ops import FEW, AllGather, AllReduce, AllToAll, Broadcast, Exchange, Meter, Op
from gradsieve.comm.rounds import has_rounds, in_rounds, program_for, route
from gradsieve.errors import Malformed
from gradsieve.pipeline.frame import CHECKSUM_WORDS, Checksum, Frame, Timeline
from gradsieve.schemes import make
from gradsieve.testing.gradients import Source
from gradsieve.types import Ctx, Outcome, Program, by_way_of

MS = 1e-3
DIRECT, BACKEND = ["direct", "direct", "backend"], ["backend"] * 3


def far(world: int, latency: float = MS) -> Links:
    """Ranks so far apart, at 10 Gbit/s, and gloo's rings on that."""
    return Links(latency, 3.2e-9, latency * (world - 1), 2 * latency * (world - 1))


def ops(words: int, world: int) -> list[Op]:
    """Of sizes alone: nothing of it is in memory."""
    own = torch.empty(words, device="meta")
    rows, ones = torch.empty(world, max(1, words // world), device="meta"), (1,) * world
    return [AllGather(own), AllReduce(own), AllToAll(rows, ones, ones, even=True)]


def routes(world: int, links: Links | None) -> list[str]:
    """Of short messages."""
    return [route(op, world, links) for op in ops(1000, world)]


@pytest.mark.parametrize("world", [8, 16, 1024])
def test_short_messages_between_far_ranks_go_by_our_own(world: int) -> None:
    assert routes(world, far(world)) == {8: DIRECT, 16: DIRECT, 1024: ["rounds"] * 3}[world]


@pytest.mark.parametrize("world", range(1, FEW + 1))
def test_few_ranks_keep_the_backends_own(world: int) -> None:
    assert routes(world, far(world, 1.0)) == BACKEND


@pytest.mark.parametrize("world", [8, 64, 1024])
def test_a_backend_with_quick_collectives_keeps_them(world: int) -> None:
    """NCCL's trees, say: a round of ours takes as long as its whole all-reduce."""
    assert routes(world, Links(50e-6, 1e-9, 30e-6, 60e-6))[:2] == BACKEND[:2]
    assert routes(world, None) == BACKEND, "nobody knows the links"


@pytest.mark.parametrize("world", [5, 8, 16, 1024])
@pytest.mark.parametrize("links", [far, nominal])
def test_long_messages_go_as_before(world: int, links: object) -> None:
    """From some length on, and never short ones again."""
    for which in range(3):
        known = links(world)  # type: ignore[operator]
        chosen = [
            route(ops(1 << power, world)[which], world, known) != "backend" for power in range(4, 34, 3)
        ]
        assert chosen == sorted(chosen, reverse=True)
        assert not chosen[-1]


def test_nominal_figures_change_nothing_for_eight_ranks_on_a_switch() -> None:
    assert routes(8, nominal(8)) == BACKEND
    assert routes(64, nominal(64))[:2] == ["rounds"] * 2


def test_what_only_one_rank_knows_chooses_nothing() -> None:
    """Counts of an uneven all-to-all can look even to one rank; what is empty is empty for all."""
    assert not has_rounds(AllToAll(torch.zeros(2), (1, 1), (1, 1)))
    assert not has_rounds(AllGather(torch.zeros(0)))
    assert not has_rounds(Broadcast(torch.zeros(3), 0))
    assert not has_rounds(Exchange(torch.zeros(3), 0, 0, 3))


def framed(program: Program[Any], checksum: Checksum, words: int) -> Program[Any]:
    return Frame(program, torch.zeros(words), checksum, Meter(0, WORLD), Timeline()).run()


def carried(program: Program[Any], rank: int, world: int, links: Links | None) -> Program[Any]:
    """As the engine carries it."""

    def perform(op: Op) -> Program[Tensor]:
        program = links and program_for(op, rank, world, links)
        return (yield from program) if program else (yield op)

    return by_way_of(program, perform)


def rounds_of_exdyna(links: Links | None, world: int = 1024) -> int:
    """Messages one after the other of an exchange, the rider's among them; gloo's rings as they are."""
    scheme, source = make("exdyna", 0.1), Source("skewed", (4099,))
    taken: list[list[Op]] = [[] for _ in range(world)]

    def noted(program: Program[Outcome[object]], rank: int) -> Program[Outcome[object]]:
        def perform(op: Op) -> Program[Tensor]:
            taken[rank].append(op)
            return (yield op)

        return by_way_of(program, perform)

    def program(rank: int) -> Program[object]:
        step = scheme.exchange(source(0, rank, 0), scheme.begin(4099, world), Ctx(rank, world, 0))
        return noted(carried(framed(step, Checksum(rank, 1), 8), rank, world, links), rank)

    results = lockstep.run([program(rank) for rank in range(world)])
    updates = [outcome.update.values for outcome, _ in results]  # type: ignore[attr-defined]
    assert all(torch.equal(each, updates[0]) for each in updates)
    kinds = [type(op) for op in taken[0]]
    ring = kinds.count(AllGather) * (world - 1) + kinds.count(AllReduce) * 2 * (world - 1)
    return ring + kinds.count(Exchange)


def test_exdyna_at_1024_ranks_takes_thirty_rounds() -> None:
    """1 ms each: 30 ms beside its bytes, where 60 are allowed."""
    assert rounds_of_exdyna(far(1024)) == 30


def test_by_gloos_rings_it_would_take_three_messages_a_rank() -> None:
    """The twin: with 1,024 ranks and 1 ms that is 3 seconds."""
    assert rounds_of_exdyna(None, world=16) == 3 * 15


WORLD = 5


def damaged(program: Program[Tensor], number: int) -> Program[Tensor]:
    """One bit of the last byte of one message, on its way."""
    sent = count()

    def perform(op: Op) -> Program[Tensor]:
        if next(sent) == number:
            content = op.tensor.clone()
            content.view(-1).view(torch.uint8)[-1] ^= 64
            op = replace(op, tensor=content)
        return (yield op)

    return by_way_of(program, perform)


def heard(number: int | None) -> None:
    """A gather in rounds, then the sum that carries the words of the ledger, in rounds too."""

    def program(rank: int) -> Program[None]:
        yield AllGather(torch.arange(7.0) * rank)
        yield AllReduce(torch.zeros(3))

    ledgers = [Checksum(rank, WORLD) for rank in range(WORLD)]
    programs = [
        by_way_of(framed(program(rank), ledger, CHECKSUM_WORDS), partial(in_rounds, rank=rank, world=WORLD))
        for rank, ledger in enumerate(ledgers)
    ]
    if number is not None:
        programs[1] = damaged(programs[1], number)
    for ledger, words in zip(ledgers, lockstep.run(programs), strict=True):
        ledger.check(words[1].tolist(), 7)


def test_a_message_damaged_in_any_round_of_a_gather_is_seen() -> None:
    heard(None)
    for number in range(3):
        with pytest.raises(Malformed, match="is not what was sent"):
            heard(number)
