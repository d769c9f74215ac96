"""What can hardly be meant is said, or refused, when a sync is made: each with what to write instead."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradsieve
from gradsieve import ConfigError, GradsieveError, MismatchError, sync
from multiproc.conftest import Pool
from multiproc.harness import Ranks
from multiproc.outside import Lines


def attached(rank: int, rates: list[float], **settings: Any) -> tuple[str, list[str]]:
    """The error of this rank, and what it says in the log."""
    said = Lines()
    model = nn.Linear(40, 40)
    optimizer = torch.optim.SGD(model.parameters(), lr=rates[rank % len(rates)])
    try:
        gradsieve.attach(DistributedDataParallel(model), optimizer, **settings).close()
    except GradsieveError as error:
        return f"{type(error).__name__}: {error}", said.lines
    return "", said.lines


def attached_without_group(rank: int, rates: list[float], **settings: Any) -> tuple[str, list[str]]:
    """Whoever leaves a group to which others are still connecting fails them, with another error."""
    with mock.patch.object(sync, "Engine", side_effect=GradsieveError("a group was made")):
        return attached(rank, rates, **settings)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"bits": "0.75"}, "bits='0.75' is a str: give a number, bits=0.75"),
        ({"bits": float("inf")}, "bits are a budget a parameter and step, above 0, not inf"),
        ({"density": "0.01"}, "density='0.01' is a str: give a number, density=0.001"),
        ({"scheme": "exdina"}, "no scheme is called 'exdina'; did you mean 'exdyna'?"),
    ],
)
def test_what_cannot_work_is_refused(two: Ranks, settings: dict[str, Any], said: str) -> None:
    for error, _ in two.run(attached_without_group, [0.1], **settings):
        assert error.startswith(f"{ConfigError.__name__}: {said}")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"bits": 100}, "rank 0: bits=100 is more than the 32 bits a parameter and step with which 2 ranks"),
        (
            {"bits": 20, "exchange": gradsieve.Steps(every=2)},
            "rank 0: bits=20 is more than the 16 bits a parameter and step",
        ),
        ({"density": 1e-9}, "rank 0: density=1e-09 of 1640 parameters is less than one element a step"),
    ],
)
def test_what_is_hardly_meant_is_said_once(two: Ranks, settings: dict[str, Any], said: str) -> None:
    (error, lines), other = two.run(attached, [0.1], **settings)
    assert (error, len(lines)) == ("", 1)
    assert lines[0].startswith(said)
    assert other == ("", [])


def test_rates_that_differ_are_told_on_all_ranks(two: Ranks) -> None:
    for rank, (error, _) in enumerate(two.run(attached, [0.1, 0.2], bits=0.75)):
        where = f"{MismatchError.__name__}: rank {rank}: "
        assert error.startswith(f"{where}ranks differ in learning rates: rank 0 has [0.1]; rank 1 has [0.2]")


def test_one_rank_alone_is_told_that_nothing_is_exchanged(pool: Pool) -> None:
    ((error, lines),) = pool(1).run(attached, [0.1], bits=0.75)
    assert error == ""
    assert len(lines) == 1
    assert "there is one rank, and nothing to exchange: the optimizer steps as without gradsieve" in lines[0]


def alone_is_as_without(rank: int) -> bool:
    ends = []
    for settings in (None, {"bits": 0.75}):
        torch.manual_seed(0)
        model = nn.Linear(32, 32)
        ddp = DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        sync = None if settings is None else gradsieve.attach(ddp, optimizer, **settings)  # type: ignore[arg-type]
        for _ in range(3):
            optimizer.zero_grad()
            ddp(torch.ones(2, 32)).square().sum().backward()
            optimizer.step()
        if sync is not None:
            sync.flush()
        ends.append([p.detach().clone() for p in model.parameters()])
    return all(torch.allclose(one, other, atol=1e-6) for one, other in zip(*ends, strict=True))


def test_one_rank_alone_trains_as_without(pool: Pool) -> None:
    assert pool(1).run(alone_is_as_without) == [True]


def strange_optimizer(rank: int, several: bool) -> str:
    model, other = nn.Linear(8, 8), nn.Linear(8, 8)
    stranger = torch.optim.AdamW(other.parameters())
    given = [torch.optim.SGD(model.parameters(), lr=0.1), stranger] if several else stranger
    try:
        gradsieve.attach(DistributedDataParallel(model), given, bits=0.75)
    except ConfigError as error:
        return str(error)
    return "nothing was noticed"


@pytest.mark.parametrize(("several", "which"), [(False, "AdamW"), (True, "AdamW (number 1)")])
def test_an_optimizer_of_another_model_is_refused_by_name(two: Ranks, several: bool, which: str) -> None:
    for rank, said in enumerate(two.run(strange_optimizer, several)):
        assert said.startswith(f"rank {rank}: {which} has none of the 2 parameters of this model")


def under_torchrun(rank: int, shared: str, restarts: str) -> list[str]:
    names = {"TORCHELASTIC_USE_AGENT_STORE": shared, "TORCHELASTIC_MAX_RESTARTS": restarts}
    with mock.patch.dict(os.environ, names):
        return attached(rank, [0.1], bits=0.75)[1]


def test_a_store_that_outlives_restarts_is_said(two: Ranks) -> None:
    first, other = two.run(under_torchrun, "True", "3")
    assert len(first) == 1
    assert "start it with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in first[0]
    assert other == []
