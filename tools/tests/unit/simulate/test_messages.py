"""Ops as rounds of messages: bytes as the meter counts them, nothing lost, fewer rounds by logs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from gradsieve.comm import lockstep, rounds
from gradsieve.comm.ops import AllGather, AllReduce, AllToAll, Broadcast, Exchange, Meter, Op
from gradsieve_tools.simulate.messages import Call, Collectives, Price, Round, call_of, rounds_of
from gradsieve_tools.simulate.network import _sampled

FREE = Price(message=1e-5, byte=1e-10)
WORLDS = [2, 3, 4, 7, 8, 16, 33]
Asked = Callable[[int, int], Op]


def vector(elements: int) -> torch.Tensor:
    return torch.zeros(elements, dtype=torch.float32)


KINDS: dict[str, Asked] = {
    "gather": lambda rank, world: AllGather(vector(40)),
    "reduce": lambda rank, world: AllReduce(vector(world * 12)),
    "to all": lambda rank, world: AllToAll(torch.zeros(world, 5), (1,) * world, (1,) * world),
    "broadcast": lambda rank, world: Broadcast(vector(40), 1),
    "exchange": lambda rank, world: Exchange(vector(9), (rank + 1) % world, (rank - 1) % world, 9),
}


def call(kind: str, world: int) -> Call:
    return call_of([KINDS[kind](rank, world) for rank in range(world)])


def sent(rounds: list[Round], world: int) -> np.ndarray:
    total = np.zeros(world)
    for one in rounds:
        np.add.at(total, one.sources, one.sizes * one.times)
    return total


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_sends_as_many_bytes_as_the_meter_counts(kind: str, world: int) -> None:
    rounds = rounds_of(call(kind, world), "ring", FREE)
    meters = [Meter(rank, world) for rank in range(world)]
    for rank, meter in enumerate(meters):
        meter.count(KINDS[kind](rank, world))
    if kind == "broadcast":  # another tree of the same size: gloo's
        assert sent(rounds, world).sum() == sum(meter.sent for meter in meters)
    else:
        np.testing.assert_allclose(sent(rounds, world), [meter.sent for meter in meters])


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("kind", ["gather", "reduce"])
def test_logs_move_no_more_bytes(kind: str, world: int) -> None:
    ways = [sent(rounds_of(call(kind, world), way, FREE), world) for way in ("ring", "log")]
    np.testing.assert_allclose(*ways)


@pytest.mark.parametrize("world", WORLDS)
def test_log_gather_is_what_the_program_for_it_sends(world: int) -> None:
    heard: list[Call] = []
    lockstep.run(
        [rounds.gather(vector(40), rank, range(world), [40] * world) for rank in range(world)],
        observe=lambda ops: heard.append(call_of(ops)),
    )
    found = [rounds_of(each, "ring", FREE)[0] for each in heard]
    meant = rounds_of(call("gather", world), "log", FREE)
    for one, other in zip(found, meant, strict=True):
        np.testing.assert_array_equal(one.targets, other.targets)
        np.testing.assert_array_equal(one.sizes, other.sizes)


@pytest.mark.parametrize("way", ["ring", "log"])
@pytest.mark.parametrize("kind", ["gather", "reduce", "to all", "broadcast"])
def test_of_all_rounds_only_those_that_are_alike_are_left_out(kind: str, way: Collectives) -> None:
    """Rounds that double are not: a few of them would stand for more bytes, or fewer."""
    world = 1024
    rounds = rounds_of(call(kind, world), way, FREE)
    some = _sampled(rounds, every=False)
    assert (len(some) < len(rounds)) == (kind == "to all" and way == "ring")
    assert sent(some, world).sum() == pytest.approx(sent(rounds, world).sum(), rel=0.01)
