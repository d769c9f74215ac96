"""The ranks of `bench step` and `bench exchange`, as a world of one: what a turn leaves for the next."""

from __future__ import annotations

import statistics
import threading
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradsieve.comm.ops import AllGather, AllReduce, AllToAll, Exchange, Op
from gradsieve.errors import ConfigError
from gradsieve_tools.bench.common import in_lab
from gradsieve_tools.bench.exchange import worker as exchange_worker
from gradsieve_tools.bench.step import worker as step_worker
from gradsieve_tools.bench.step.timeline import COMPUTING, from_all_ranks
from gradsieve_tools.bench.step.worker import Arena, Contestant

DENSITY = 0.02


@pytest.fixture(autouse=True)
def world_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def arena() -> Arena:
    torch.manual_seed(0)
    return Arena(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)), None)


@pytest.fixture
def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(8, 64), torch.randn(8, 64)


def test_the_turns_of_others_are_nothing_to_a_sync_of_ours(
    arena: Arena, batch: tuple[Tensor, Tensor]
) -> None:
    """With noop's turns in between, ours goes the very way that it goes alone."""
    ours, alone = (Contestant("exdyna", arena, DENSITY) for _ in range(2))
    noop = Contestant("noop", arena, DENSITY)
    first = [own.clone() for own in ours.own]
    for _ in range(4):
        ours.run(batch, 2, measured=True)
        noop.run(batch, 3, measured=True)
    for _ in range(4):
        alone.run(batch, 2, measured=True)
    assert all(map(torch.equal, ours.own, alone.own))
    assert not any(map(torch.equal, ours.own, first)), "nothing was learnt"
    assert ours.sent == alone.sent


def test_without_its_own_parameters_it_would_not(arena: Arena, batch: tuple[Tensor, Tensor]) -> None:
    ours, alone = (Contestant("exdyna", arena, DENSITY) for _ in range(2))
    noop = Contestant("noop", arena, DENSITY)
    ours.own.clear()
    for _ in range(4):
        ours.run(batch, 2, measured=True)
        noop.run(batch, 3, measured=True)
    mixed = [parameter.detach().clone() for parameter in arena.parameters]
    for _ in range(4):
        alone.run(batch, 2, measured=True)
    assert not all(map(torch.equal, mixed, alone.own))


def test_ours_is_finished_when_its_optimizer_steps(arena: Arena, batch: tuple[Tensor, Tensor]) -> None:
    ours = Contestant("exdyna", arena, DENSITY)
    assert ours.sync is not None
    ours.run(batch, 3, measured=True)
    assert ours.sync.pipeline.step == 3
    names = [event.name for event in ours.last_step]
    assert {*COMPUTING, "exchange", "waiting", "apply", "commit", "check", "optimizer"} <= set(names)
    assert names[-1] == "optimizer"
    assert 0.0 <= ours.behind <= ours.exchange


def test_noop_has_nothing_of_ours(arena: Arena, batch: tuple[Tensor, Tensor]) -> None:
    noop = Contestant("noop", arena, DENSITY)
    assert noop.sync is None
    assert noop.own == []
    assert noop.optimizer is arena.optimizer
    noop.run(batch, 1, measured=True)
    assert noop.last_step == []
    assert noop.density() == 1.0


def test_events_of_all_ranks(arena: Arena, batch: tuple[Tensor, Tensor]) -> None:
    ours = Contestant("exdyna", arena, DENSITY)
    ours.run(batch, 1, measured=True)
    assert from_all_ranks(ours.last_step) == [ours.last_step]


def test_rows_have_what_the_command_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_worker, "build", lambda *_: nn.Linear(64, 64))
    monkeypatch.setattr(step_worker, "batch_for", lambda *_: (torch.randn(8, 64), torch.randn(8, 64)))
    config = {
        "workload": "mlp",
        "params": 1,
        "syncs": ["noop", "dense", "exdyna", "exdyna@gradients"],
        "density": 0.02,
        "rounds": 2,
    }
    before = set(threading.enumerate())
    rows = {row["sync"]: row for row in step_worker.measure(config)}
    assert set(threading.enumerate()) <= before, "a sync was not closed"
    assert list(rows) == config["syncs"]
    assert rows["noop"]["vs_noop"] == rows["dense"]["vs_dense"] == 1.0
    assert "hidden" not in rows["noop"]
    assert 0.0 <= rows["exdyna"]["hidden"] <= 1.0
    assert rows["exdyna@gradients"]["hidden"] is None
    assert [row["late"] for row in rows.values()] == [None, 0, 1, 0]
    assert len(rows["exdyna"]["timeline"]) == 1
    assert 0.01 < rows["exdyna"]["density"] < 0.04
    for row in rows.values():
        for ratio in ("vs_noop", "vs_dense"):
            low, high = row[f"{ratio}_half"]
            assert min(row[f"{ratio}_all"]) <= low <= row[ratio] <= high <= max(row[f"{ratio}_all"])
            assert len(row[f"{ratio}_all"]) == config["rounds"]


def test_ratios_are_formed_within_a_round_and_come_with_their_spread() -> None:
    found = in_lab.ratio("vs_noop", [2.0, 6.0, 9.0, 20.0, 100.0], [1.0, 2.0, 1.0, 5.0, 10.0])
    assert found == {"vs_noop": 4.0, "vs_noop_half": [3.0, 9.0], "vs_noop_all": [2.0, 3.0, 9.0, 4.0, 10.0]}
    assert in_lab.ratio("x", [3.0], [2.0]) == {"x": 1.5, "x_half": [1.5, 1.5], "x_all": [1.5]}


@pytest.mark.parametrize("scheme", ["exdyna", "exdyna@gradients"])
def test_rows_of_the_exchange(scheme: str, capfd: pytest.CaptureFixture[str]) -> None:
    config = {"scheme": scheme, "params": 20_480, "density": 0.01, "rounds": 3}
    rows = exchange_worker.measure(config)
    assert [row["what"] for row in rows] == ["bare gloo", "engine", "in a step"]
    assert rows[0]["ratio"] == 1.0
    assert statistics.median(rows[1]["ms_all"]) == rows[1]["ms"]
    assert "AllGather of uint8" in capfd.readouterr().err


@pytest.mark.parametrize(
    "op",
    [
        AllGather(torch.arange(6).view(2, 3)),
        AllReduce(torch.arange(6.0)),
        AllToAll(torch.arange(6).view(2, 3), (2,), (2,)),
    ],
)
def test_every_collective_has_a_bare_form(op: Op) -> None:
    assert dist.group.WORLD is not None
    assert exchange_worker.bare(op, dist.group.WORLD)() is None


def test_a_message_between_two_ranks_has_none() -> None:
    assert dist.group.WORLD is not None
    with pytest.raises(ConfigError, match="asks for collectives"):
        exchange_worker.bare(Exchange(torch.zeros(1), 0, 0, 1), dist.group.WORLD)
