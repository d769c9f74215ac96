"""Exchange of steps behind DistributedDataParallel: every rank has a model of its own, until `flush`."""

from __future__ import annotations

import time
from concurrent.futures import wait
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradsieve
from gradsieve.pipeline import StepPipeline
from multiproc.harness import Ranks
from multiproc.training import RATE, Plan, Run, differing, usual

WHOLE: dict[str, Any] = {"exchange": gradsieve.Steps(), "preview": 1.0}
"""With whole numbers for gradients, all sums are exact."""

lossy = pytest.mark.parametrize("scheme", usual(lossless=False))


def train(rank: int, plan: Plan) -> list[dict[str, Tensor]]:
    """What was fed, the rank's own model before the flush, the model after it, the one shown before it."""
    run = Run(rank, plan).train()
    assert isinstance(run.sync.pipeline, StepPipeline)
    run.sync.verify()
    own = {name: part.clone() for name, part in run.sync.replica.models.own.items()}
    shown = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    run.sync.flush()
    run.sync.verify()
    assert not any(bool(waiting.any()) for waiting in run.sync.pipeline.residuals())
    flushed = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    return [run.seen.fed, own, flushed, shown]


@lossy
def test_after_a_flush_all_ranks_have_what_all_of_them_learnt(two: Ranks, scheme: str) -> None:
    seen = two.run(train, Plan(scheme=scheme, **WHOLE))
    for name in seen[0][0]:
        learnt = -RATE * (seen[0][0][name] + seen[1][0][name]) / 2
        assert torch.equal(seen[0][2][name].double(), learnt), f"{name}: something was lost or made up"
    assert differing(seen[0][2], seen[1][2]) == []


def overflowing_flush(rank: int) -> tuple[str, bool, float]:
    """Each rank has moved as far as a float32 goes: what all of them moved is not one."""
    run = Run(rank, Plan(**WHOLE)).train()
    assert isinstance(run.sync.pipeline, StepPipeline)
    name, own = next(iter(run.sync.replica.models.own.items()))
    shared = run.sync.replica.models.shown()[name].clone()
    own.fill_(-3e38)
    with pytest.raises(gradsieve.GradsieveError) as error:
        run.sync.flush()
    return str(error.value), torch.equal(run.sync.replica.models.shown()[name], shared), float(own.max())


def test_a_flush_that_overflows_says_so_and_keeps_everything(two: Ranks) -> None:
    for said, untouched, own in two.run(overflowing_flush):
        assert "nothing was flushed, and all residuals are as they were" in said
        assert untouched
        assert own == pytest.approx(-3e38)


def agreement(rank: int, backwards: int) -> float:
    """How much the ranks' gradients agree after so many averaging backwards to each step."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(64, 16, bias=False))
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    torch.manual_seed(rank)
    with gradsieve.attach(ddp, optimizer, bits=4) as sync:
        for _ in range(20):
            optimizer.zero_grad()
            for _ in range(backwards):
                (ddp(torch.randn(8, 64)) - torch.randn(8, 16)).square().sum().backward()
            optimizer.step()
        return float(sync.pipeline.rho)


@pytest.mark.parametrize("backwards", [1, 2, 3, 4])
def test_agreement_is_measured_however_many_backwards_belong_to_a_step(two: Ranks, backwards: int) -> None:
    first, second = two.run(agreement, backwards)
    assert first == second
    assert 0.5 <= first < 0.95, "1 is what is assumed before it was measured"


def joined(rank: int) -> str:
    run = Run(rank, Plan(**WHOLE))
    with pytest.raises(gradsieve.ConfigError) as refusal, run.ddp.join():
        run.train(1)
    return str(refusal.value)


def test_join_is_refused(two: Ranks) -> None:
    """It ends with one rank's model for all."""
    assert all("exchange=gradsieve.Gradients()" in said for said in two.run(joined))


def exchanged(rank: int) -> dict[str, int]:
    """How many exchanges there were after each of these, in this order."""
    model = nn.Linear(40, 40)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ddp = DistributedDataParallel(model)
    sync = gradsieve.attach(ddp, optimizer, density=0.1)
    inputs = torch.full((2, 40), float(rank))
    seen = {}

    def look(after: str) -> None:
        assert sync.runner.pending is None
        seen[after] = sync.pipeline.step

    with ddp.no_sync():
        ddp(inputs).sum().backward()
    look("a backward that does not average")
    ddp.eval()
    ddp(inputs)
    ddp.train()
    with torch.no_grad():
        ddp(inputs)
    look("forwards of other kinds")
    ddp(inputs)
    loss = ddp(inputs).sum()
    look("forwards to train")
    loss.backward()
    look("a backward that averages")
    optimizer.step()
    look("the optimizer's step")
    ddp.eval()
    ddp(inputs).sum().backward()
    look("a backward in evaluation mode")
    optimizer.step()
    sync.close()
    ddp.train()
    ddp(inputs).sum().backward()
    look("close")
    return seen


EXCHANGED = {
    "a backward that does not average": 0,
    "forwards of other kinds": 0,
    "forwards to train": 0,
    "a backward that averages": 1,
    "the optimizer's step": 1,
    "a backward in evaluation mode": 2,
    "close": 2,
}


def test_an_exchange_belongs_to_a_backward_that_averages(two: Ranks) -> None:
    assert two.run(exchanged) == [EXCHANGED, EXCHANGED]


def applied(rank: int, calls_a_part: bool = False, waits: bool = True) -> tuple[list[bool], list[Tensor]]:
    """Of each step, whether the exchange was applied before backward came to the first layer; and the shared
    model as an evaluation in the midst of backward sees it. With `calls_a_part`, the graph remembers the
    shared model's first layer, which backward reads last."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.arange(parameter.numel()).view_as(parameter) % 5 / 4 - 0.5)
    ddp = DistributedDataParallel(model, bucket_cap_mb=1e-4)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.125)
    sync = gradsieve.attach(ddp, optimizer, scheme="exdyna", density=0.25)
    done, seen = [], []

    def look(_: Tensor) -> None:
        applied = None if sync.runner.pending is None else sync.runner.pending.applied
        if waits and applied is not None:
            wait([applied], timeout=20.0)
        done.append(applied is not None and applied.done())
        ddp.eval()
        with torch.no_grad():
            seen.append(ddp(torch.ones(1, 8)))
        ddp.train()

    model[0].weight.register_hook(look)
    for step in range(4):
        batch = torch.full((2, 8), 1.0 + rank + step, requires_grad=True)
        part = model[2](model[0](batch)).square().mean() if calls_a_part else 0.0
        (ddp(batch).square().mean() + part).backward()
        optimizer.step()
        optimizer.zero_grad()
    sync.close()
    return done, seen


def test_an_exchange_is_applied_while_backward_runs(two: Ranks) -> None:
    (first, seen), (second, theirs) = two.run(applied)
    assert all(first[1:]), "DDP has one bucket in its first backward"
    assert all(second[1:])
    assert all(torch.equal(one, other) for one, other in zip(seen, theirs, strict=True))
    assert not torch.equal(seen[1], seen[2])


def applied_slowly(rank: int) -> tuple[list[bool], list[Tensor]]:
    """On rank 0, where an evaluation comes before it is done; on rank 1 after it."""
    complete = StepPipeline.complete

    def slow(self: StepPipeline, *arguments: Any) -> bool:
        time.sleep(0.2 * (rank == 0))
        return complete(self, *arguments)

    with mock.patch.object(StepPipeline, "complete", slow):
        return applied(rank, waits=rank != 0)


def test_an_evaluation_meanwhile_waits_for_it(two: Ranks) -> None:
    (done, seen), (others, theirs) = two.run(applied_slowly)
    assert not any(done)
    assert all(others[1:])
    assert all(torch.equal(one, other) for one, other in zip(seen, theirs, strict=True))


def test_not_where_a_graph_would_read_what_is_written(two: Ranks) -> None:
    for done, _ in two.run(applied, True):
        assert not any(done)
