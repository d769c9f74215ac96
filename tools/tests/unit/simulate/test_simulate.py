"""`gradsieve simulate`: SimGrid against formulas, schedules against those at the true size, the command."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from gradsieve.comm import lockstep, rounds
from gradsieve.comm.ops import AllReduce
from gradsieve.types import Program
from gradsieve_tools.cli.main import main
from gradsieve_tools.errors import SimulationError
from gradsieve_tools.simulate import network as simulated
from gradsieve_tools.simulate import recording, study
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


def test_without_simgrid_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated.python_with_simgrid.cache_clear()
    monkeypatch.setattr(simulated, "_PYTHONS", ("/nowhere/python",))
    with pytest.raises(SimulationError, match="apt install python3-simgrid"):
        simulated.require()
    simulated.python_with_simgrid.cache_clear()


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


def test_growth_is_found_and_says_how_far_off_it_is() -> None:
    worlds = np.array([4.0, 16.0, 64.0, 256.0])
    exact = study.growth(worlds, 0.5 + 0.01 * np.log2(worlds) + 0.002 * worlds)
    assert exact.at(16_384) == pytest.approx(0.5 + 0.14 + 32.768, rel=1e-6)
    assert exact.error < 1e-9
    falling = study.growth(worlds, 1 / worlds)
    assert falling.at(16_384) >= 0
    assert falling.error > 0.5
    assert study.growth(worlds, np.zeros(4)).at(16_384) == 0


@needs_simgrid
def test_the_command_writes_rows_picture_and_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {name: tmp_path / f"out.{name}" for name in ("json", "plot", "html")}
    options = [
        f"--{name}={path}.png" if name == "plot" else f"--{name}={path}" for name, path in files.items()
    ]
    asked = ["simulate", "--schemes=topk", "--world=2,4,8,2048", "--params=1e5", "--topology=torus"]
    assert main([*asked, "--collectives=log", "--slow-links=1:2", *options]) == 0
    rows = json.loads(files["json"].read_text())["rows"]
    assert {row["scheme"] for row in rows} == {"noop", "dense", "topk"}
    assert Path(f"{files['plot']}.png").stat().st_size > 10_000
    page = files["html"].read_text()
    assert "<svg" in page
    assert "2,048*" in page
    assert "dense" in capsys.readouterr().out
