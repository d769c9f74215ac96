"""Which collectives go in rounds, and what that costs at 1,024 ranks."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import pytest
import torch
from torch import Tensor

from gradsieve.comm import lockstep
from gradsieve.comm.links import Links, nominal
from gradsieve.comm.meter import Meter
from gradsieve.comm.ops import AllGather, AllReduce, AllToAll, Broadcast, Exchange, Op, describe
from gradsieve.comm.rounds import FEW, Rounds, has_rounds, in_rounds, measure_all
from gradsieve.errors import Malformed
from gradsieve.feedback.piggyback import carry
from gradsieve.pipeline.checksum import WORDS, Checksum
from gradsieve.pipeline.gradients import GradientPipeline
from gradsieve.schemes import make
from gradsieve.testing.gradients import Source
from gradsieve.types import Ctx, Outcome, Program, by_way_of

MS = 1e-3
DIRECT, ENGINE = ["direct", "direct", "engine"], ["engine"] * 3
CPU = torch.device("cpu")


def far(world: int, latency: float = MS) -> Links:
    """Ranks so far apart, at 10 Gbit/s, and gloo's rings on that."""
    return Links(latency, 3.2e-9, latency * (world - 1), 2 * latency * (world - 1))


def ops(words: int, world: int) -> list[Op]:
    """Of sizes alone: nothing of it is in memory."""
    own = torch.empty(words, device="meta")
    rows, ones = torch.empty(world, max(1, words // world), device="meta"), (1,) * world
    return [AllGather(own), AllReduce(own), AllToAll(rows, ones, ones, even=True)]


@pytest.mark.parametrize("world", [8, 16, 1024])
def test_short_messages_between_far_ranks_go_by_our_own(world: int) -> None:
    chosen = [*map(Rounds(0, world, far(world)).chosen, ops(1000, world))]
    assert chosen == {8: DIRECT, 16: DIRECT, 1024: ["rounds"] * 3}[world]


@pytest.mark.parametrize("world", range(1, FEW + 1))
def test_few_ranks_keep_the_engines_own(world: int) -> None:
    assert [*map(Rounds(0, world, far(world, 1.0)).chosen, ops(1000, world))] == ENGINE
    program = alone(AllReduce(torch.zeros(3)))
    assert Rounds(0, world, far(world, 1.0)).carried(program) is program, "nothing is in the way"


@pytest.mark.parametrize("world", [8, 64, 1024])
def test_an_engine_with_quick_collectives_keeps_them(world: int) -> None:
    """NCCL's trees, say: a round of ours takes as long as its whole all-reduce."""
    quick = Rounds(0, world, Links(50e-6, 1e-9, 30e-6, 60e-6))
    assert [*map(quick.chosen, ops(1000, world)[:2])] == ENGINE[:2]
    assert [*map(Rounds(0, world).chosen, ops(1000, world))] == ENGINE, "nobody knows the links"


@pytest.mark.parametrize("world", [5, 8, 16, 1024])
@pytest.mark.parametrize("links", [far, nominal])
def test_long_messages_go_as_before(world: int, links: object) -> None:
    """From some length on, and never short ones again."""
    rounds = Rounds(0, world, links(world))  # type: ignore[operator]
    for which in range(3):
        chosen = [rounds.chosen(ops(1 << power, world)[which]) != "engine" for power in range(4, 34, 3)]
        assert chosen == sorted(chosen, reverse=True)
        assert not chosen[-1]


def test_nominal_figures_change_nothing_for_eight_ranks_on_a_switch() -> None:
    assert [*map(Rounds(0, 8, nominal(8)).chosen, ops(1000, 8))] == ENGINE
    assert [*map(Rounds(0, 64, nominal(64)).chosen, ops(1000, 64)[:2])] == ["rounds"] * 2


def test_what_only_one_rank_knows_chooses_nothing() -> None:
    """Counts of an uneven all-to-all can look even to one rank; what is empty is empty for all."""
    assert not has_rounds(AllToAll(torch.zeros(2), (1, 1), (1, 1)))
    assert not has_rounds(AllGather(torch.zeros(0)))
    assert not has_rounds(Broadcast(torch.zeros(3), 0))
    assert not has_rounds(Exchange(torch.zeros(3), 0, 0, 3))


def test_links_and_the_engines_own_collectives_are_measured_alike() -> None:
    for world in (FEW, FEW + 1):
        seen = lockstep.run([measure_all(Ctx(rank, world, 0), CPU) for rank in range(world)])
        assert len(set(seen)) == 1
        assert (seen[0].gather > 0) == (seen[0].sum > 0) == (world > FEW)


def alone(op: Op) -> Program[Tensor]:
    return (yield op)


def test_a_message_says_to_which_collective_it_belongs() -> None:
    op = next(in_rounds(AllReduce(torch.zeros(9)), 2, 5))
    assert describe(op) == "Exchange of float32 within AllReduce of float32 (9,)"


# -- 1,024 ranks ----------------------------------------------------------------------------------------


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
        return noted(Rounds(rank, world, links).carried(carry(step, torch.zeros(8))), rank)  # type: ignore[arg-type]

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


# -- what is around an exchange -------------------------------------------------------------------------

WORLD = 5


@pytest.fixture
def in_rounds_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """So few ranks would go directly."""
    monkeypatch.setattr(Rounds, "chosen", lambda self, op: "rounds" if has_rounds(op) else "engine")


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

    def program(rank: int) -> Program[Tensor]:
        yield AllGather(torch.arange(7.0) * rank)
        return (yield AllReduce(torch.zeros(3 + WORDS)))

    ledgers = [Checksum(rank, WORLD) for rank in range(WORLD)]
    rounds = [Rounds(rank, WORLD, far(WORLD)) for rank in range(WORLD)]
    programs = [
        rounds[rank].carried(ledger.watched(program(rank), torch.float32))
        for rank, ledger in enumerate(ledgers)
    ]
    if number is not None:
        programs[1] = damaged(programs[1], number)
    for ledger, words in zip(ledgers, lockstep.run(programs), strict=True):
        ledger.check(words[-WORDS:].tolist(), 7)


@pytest.mark.usefixtures("in_rounds_only")
def test_a_message_damaged_in_any_round_of_a_gather_is_seen() -> None:
    heard(None)
    for number in range(3):
        with pytest.raises(Malformed, match="is not what was sent"):
            heard(number)


@pytest.mark.usefixtures("in_rounds_only")
def test_a_pipeline_counts_what_it_really_sends() -> None:
    """And the time of a collective is the exchange's, however many messages it takes."""
    sums = []
    for links in (None, far(WORLD)):
        models = [{"w": torch.zeros(64, 100)} for _ in range(WORLD)]
        pipelines = [
            GradientPipeline(model.items(), make("exdyna", 0.1), rank, WORLD)
            for rank, model in enumerate(models)
        ]
        for rank, pipeline in enumerate(pipelines):
            pipeline.rounds = Rounds(rank, WORLD, links)
        gradients = [{"w": Source("integers", (6400,))(0, rank, 0)} for rank in range(WORLD)]
        meters = [Meter(rank, WORLD) for rank in range(WORLD)]
        lockstep.run([p.program(0, g) for p, g in zip(pipelines, gradients, strict=True)], meters)
        for pipeline, meter in zip(pipelines, meters, strict=True):
            assert pipeline.stats.meter == meter
        assert meters[0].collectives == (2 if links is None else 9)
        assert meters[0].rounds == 9
        spans = [span.name for span in pipelines[0].stats.timeline.spans]
        assert spans.count("exchange") == 3, "two collectives, and the look at the second one"
        sums.append(gradients[0]["w"])
    assert torch.equal(*sums), "whole numbers: the order of a sum does not show"
