"""`gradsieve simulate`: SimGrid against formulas, schedules against those at the true size, the command."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from gradsieve.comm import lockstep, rounds
from gradsieve.comm.ops import AllReduce
from gradsieve.types import Program
from gradsieve_tools.simulate import network as simulated
from gradsieve_tools.simulate import recording
from gradsieve_tools.simulate.messages import Call
from gradsieve_tools.simulate.platforms import TOPOLOGIES, Wires, platform
from gradsieve_tools.specs import parse

needs_simgrid = pytest.mark.skipif(
    simulated.python_with_simgrid() is None,
    reason="no SimGrid here: apt install python3-simgrid",
)
WIRES = Wires(rate=1.25e9, delay=1e-5, wan_rate=1.25e8, wan_delay=0.01, message_seconds=2e-5)
MODEL = 100e6
"""Bytes."""


def reduce_all(world: int) -> Call:
    return Call("AllReduce", np.full(world, MODEL))


def ring_formula(world: int, wires: Wires) -> float:
    """2 (P - 1) rounds, each a message over two links."""
    each = wires.message_seconds + 2 * wires.delay + MODEL / world / wires.rate
    return 2 * (world - 1) * each


@needs_simgrid
@pytest.mark.parametrize("world", [2, 16, 250])
def test_a_dense_ring_on_an_idle_star_takes_what_the_formula_says(world: int) -> None:
    with simulated.network(platform("star", world, WIRES)) as over:
        carried = over.carry(reduce_all(world))
    assert carried.seconds == pytest.approx(ring_formula(world, WIRES), rel=0.05)
    assert (carried.rounds, carried.simulated) == (2 * (world - 1), 1)


@needs_simgrid
def test_the_formula_does_not_hold_with_one_slow_link() -> None:
    """The twin of the test above. The whole ring waits for one link."""
    slow = replace(WIRES, slow_hosts=1, slow_factor=10.0)
    with simulated.network(platform("star", 16, slow)) as over:
        seconds = over.carry(reduce_all(16)).seconds
    assert seconds == pytest.approx(ring_formula(16, replace(WIRES, rate=WIRES.rate / 10)), rel=0.05)


@needs_simgrid
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_rounds_simulated_once_take_as_long_as_all_of_them(topology: str) -> None:
    world, unlike = 12, replace(WIRES, slow_hosts=2, slow_factor=3.0)
    with simulated.network(platform(topology, world, unlike)) as over:
        once, loads = over.carry(reduce_all(world)), over.loads()
        each, as_many = over.carry(reduce_all(world), every=True), over.loads()
    assert once.seconds == pytest.approx(each.seconds)
    assert (once.simulated, each.simulated) == (1, 22)
    np.testing.assert_allclose(loads, as_many)
    assert loads.sum() >= 22 * MODEL * 0.99


@needs_simgrid
def test_programs_end_as_in_lockstep_and_exchanges_are_carried() -> None:
    def summed(rank: int) -> Program[torch.Tensor]:
        total = yield AllReduce(torch.full((6,), float(rank)))
        return (yield from rounds.gather(total[: rank + 1], rank, range(5), [1, 2, 3, 4, 5]))

    with simulated.network(platform("star", 5, WIRES)) as over:
        found, carried = simulated.run([summed(rank) for rank in range(5)], over)
    for one, other in zip(found, lockstep.run([summed(rank) for rank in range(5)]), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert carried.rounds == 8 + 3  # a ring there and back, and ceil(log2 5)


@pytest.mark.parametrize(
    "scheme", ["dense", "topk", "topk-union", "gtopk", "exdyna", "stripes", "oktopk", "spardl"]
)
def test_scaled_messages_are_those_of_the_true_size(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A vector eight times as long as the recordings, whose half is a sixteenth."""
    world, n = 8, 3 * 256 * 8 * 64
    made = parse(scheme, None if scheme == "stripes" else 0.01)
    true = recording.recorded(made, n, world)
    assert not true.scaled
    for name, most in (
        ("_SCANNED", n),
        ("_PICKED", world * made.k(n) // 16),
        ("_READ", n * world // 24),
    ):
        monkeypatch.setattr(recording, name, most)
    scaled = recording.recorded(made, n, world)
    assert scaled.scaled
    assert [call.kind for call in scaled.calls] == [call.kind for call in true.calls]
    for one, other in zip(scaled.calls, true.calls, strict=True):
        assert one.mean == pytest.approx(other.mean, rel=0.08, abs=8)
