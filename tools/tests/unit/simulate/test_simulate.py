"""`gradsieve simulate`: SimGrid against formulas, schedules against those at the true size, the command."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from gradsieve.comm import lockstep, rounds
from gradsieve.comm.ops import AllReduce
from gradsieve.errors import ConfigError
from gradsieve.types import Program
from gradsieve_tools.cli.main import main
from gradsieve_tools.errors import SimulationError
from gradsieve_tools.simulate import network as simulated
from gradsieve_tools.simulate import recording, study
from gradsieve_tools.simulate.messages import Call
from gradsieve_tools.simulate.platforms import TOPOLOGIES, Wires, platform, spread
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
def test_some_rounds_of_an_all_to_all_stand_for_all() -> None:
    world = 64
    with simulated.network(platform("fat-tree", world, WIRES)) as over:
        some = over.carry(Call("AllToAll", np.full((world, world), 1e5)))
        every = over.carry(Call("AllToAll", np.full((world, world), 1e5)), every=True)
    assert some.rounds == every.rounds == every.simulated == 16
    assert some.simulated == simulated.FEW_ROUNDS
    assert some.seconds == pytest.approx(every.seconds, rel=0.15)


@needs_simgrid
@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("world", [2, 5, 33])
def test_every_pair_of_ranks_has_a_way_on_every_network(topology: str, world: int) -> None:
    with simulated.network(platform(topology, world, WIRES)) as over:
        carried = over.carry(Call("AllToAll", np.full((world, world), 1e4)), every=True)
    assert carried.seconds > 0


@needs_simgrid
def test_neighbours_stay_within_a_cloud_and_others_pay_for_the_wan() -> None:
    with simulated.network(platform("two-clouds", 8, WIRES)) as over:
        far = Call("Exchange", np.full(8, 1e4), to=(np.arange(8) + 4) % 8)
        near = Call("Exchange", np.full(8, 1e4), to=np.arange(8) ^ 1)
        assert over.carry(near).seconds < 1e-3
        assert over.carry(far).seconds > WIRES.wan_delay
        loads = dict(zip(over.links, over.loads(), strict=True))
    assert loads["wan-from-east"] == loads["wan-from-west"] == 4e4


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


@needs_simgrid
def test_a_simulator_that_dies_is_named() -> None:
    with (
        pytest.raises(SimulationError, match="ended with code"),
        simulated.network(replace(platform("star", 4, WIRES), xml="<nonsense/>")),
    ):
        pass


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


def test_messages_that_do_not_grow_are_not_scaled() -> None:
    sizes = [recording.Size(n, n // 10) for n in (1000, 2000, 20_000)]
    small = [Call("AllGather", np.full(4, 8.0)), Call("AllReduce", np.full(4, 400.0 + 12))]
    large = [Call("AllGather", np.full(4, 8.0)), Call("AllReduce", np.full(4, 800.0 + 12))]
    counts, values = recording._scaled(small, large, *sizes)
    assert counts.mean == 8
    assert values.mean == pytest.approx(8000 + 12)


def test_what_builds_up_is_known() -> None:
    found = {name for name in ("topk", "topk-union", "exdyna", "oktopk", "spardl", "stripes")
             if recording.builds_up(parse(name, 1 / 64))}  # fmt: skip
    assert found == {"topk", "topk-union"}


def test_growth_is_found_and_says_how_far_off_it_is() -> None:
    worlds = np.array([4.0, 16.0, 64.0, 256.0])
    exact = study.growth(worlds, 0.5 + 0.01 * np.log2(worlds) + 0.002 * worlds)
    assert exact.at(16_384) == pytest.approx(0.5 + 0.14 + 32.768, rel=1e-6)
    assert exact.error < 1e-9
    falling = study.growth(worlds, 1 / worlds)
    assert falling.at(16_384) >= 0
    assert falling.error > 0.5
    assert study.growth(worlds, np.zeros(4)).at(16_384) == 0


def plan(**changes: object) -> study.Plan:
    base = study.Plan(schemes=("exdyna",), worlds=(4, 8, 16), topology="star", wires=WIRES, params=200_000)
    return replace(base, **changes)


@needs_simgrid
def test_rows_have_the_limit_and_the_baseline_and_beyond_a_thousand_say_so() -> None:
    done: list[float] = []
    asked = plan(worlds=(4, 8, 16, 2048))
    rows = study.run(asked, lambda work, doing: done.append(work))
    assert sum(done) == pytest.approx(asked.work())
    assert [row["scheme"] for row in rows[:3]] == ["noop", "dense", "exdyna"]
    assert all(set(study.COLUMNS) <= set(row) for row in rows if not row["extrapolated"])
    assert [row["world"] for row in rows if row["extrapolated"]] == [2048] * 3
    assert all(row["efficiency"] == 1 for row in rows if row["scheme"] == "noop")
    largest = [row for row in rows if row["world"] == 16 and row["scheme"] == "dense"]
    # 50 kB to a message take as long as its delay and its cost: links are busy half of the time.
    assert max(largest[0]["links"].values()) == pytest.approx(0.5)
    assert all("links" not in row for row in rows if row["world"] == 4)


@needs_simgrid
def test_stragglers_hold_up_everybody() -> None:
    usual, late = (study.run(plan(worlds=(4,), stragglers=count, straggler_factor=2.0)) for count in (0, 1))
    for row, other in zip(usual, late, strict=True):
        assert other["step_seconds"] == pytest.approx(row["step_seconds"] + row["compute_seconds"])


def test_worlds_beyond_a_thousand_need_three_below() -> None:
    with pytest.raises(ConfigError, match="--world 64,256,1024,16384"):
        plan(worlds=(4, 1024, 16_384))
    with pytest.raises(ConfigError, match="9 of 4 ranks"):
        plan(stragglers=9)
    assert spread(3, 9) == [0, 3, 6]


@needs_simgrid
def test_more_teams_take_fewer_rounds() -> None:
    rows = study.run(plan(schemes=("spardl:teams=1", "spardl:teams=8"), worlds=(16,)))
    one, eight = (next(row for row in rows if row["scheme"] == f"spardl:teams={d}") for d in (1, 8))
    assert eight["rounds"] < one["rounds"]


def test_a_model_is_as_many_units_as_it_has_hundreds_of_megabytes() -> None:
    asked = plan(params=10**9)
    assert asked.units(parse("exdyna")) == 39
    assert asked.units(parse("exdyna-paper")) == 1
    assert asked.unit(parse("exdyna")) == math.ceil(10**9 / 39)


@needs_simgrid
def test_dense_goes_by_rings_and_sparse_by_rounds_unless_it_is_asked_otherwise() -> None:
    rounds = {
        way: {row["scheme"]: row["rounds"] for row in study.run(plan(worlds=(16,), collectives=way))}
        for way in ("ours", "ring", "log")
    }
    assert rounds["ours"]["dense"] == rounds["ring"]["dense"] == 30
    assert rounds["ours"]["exdyna"] == rounds["log"]["exdyna"] < rounds["ring"]["exdyna"]


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


@pytest.mark.parametrize(
    ("option", "said"),
    [("--rate=unshaped", "has a rate"), ("--link=fast", "not a link rate"), ("--density=2", "density"),
     ("--world=64,4096", "at least 3")],
)  # fmt: skip
def test_settings_that_cannot_work_are_refused(
    option: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", option]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("memory", ["0", "0GB/s", "20", "fast"])
def test_memory_has_a_unit_as_everywhere(memory: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["simulate", "--memory", memory])
    assert "20GB/s" in capsys.readouterr().err
