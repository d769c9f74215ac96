"""The ranks of `bench step` and `bench exchange`, as a world of one: what a turn leaves for the next."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradsieve_tools.bench import exchange as exchange_worker
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


@pytest.mark.parametrize("scheme", ["exdyna", "exdyna@gradients"])
def test_rows_of_the_exchange(scheme: str, capfd: pytest.CaptureFixture[str]) -> None:
    config = {"scheme": scheme, "params": 20_480, "density": 0.01, "rounds": 3}
    rows = exchange_worker.measure(config)
    assert [row["what"] for row in rows] == ["bare gloo", "engine", "in a step"]
    assert rows[0]["ratio"] == 1.0
    assert statistics.median(rows[1]["ms_all"]) == rows[1]["ms"]
    assert "AllGather of uint8" in capfd.readouterr().err
