"""`Steps(overlap=0)`: what a step moved is with all ranks before the next forward; nothing is lost."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradsieve
from multiproc.harness import Ranks
from multiproc.training import RATE, Plan, Run

NOW = gradsieve.Steps(preview=1.0, overlap=0)
STEPS = 5


def learnt(rank: int, treatment: gradsieve.Steps | None) -> Tensor:
    """A model that each rank trains on data of its own; with no treatment by plain DDP. All is sent."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 8))
    torch.manual_seed(1 + rank)
    inputs, target = torch.randn(16, 40), torch.randn(16, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    ddp = DistributedDataParallel(model)
    sync = None
    if treatment is not None:
        sync = gradsieve.attach(ddp, optimizer, scheme="topk", density=1.0, exchange=treatment)
    for _ in range(STEPS):
        optimizer.zero_grad()
        nn.functional.mse_loss(ddp(inputs), target).backward()
        optimizer.step()
    if sync is not None:
        sync.flush()
        sync.close()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_a_training_that_sends_all_in_the_same_step_is_the_dense_one(two: Ranks) -> None:
    """Every gradient was computed on a model that knows all steps of all ranks."""
    dense, _ = two.run(learnt, None)
    now, other = two.run(learnt, NOW)
    assert torch.equal(now, other)
    assert torch.allclose(now, dense, rtol=1e-4, atol=1e-6)


def test_one_step_late_it_is_another(two: Ranks) -> None:
    """The twin: sending all is not enough."""
    dense, _ = two.run(learnt, None)
    late, _ = two.run(learnt, gradsieve.Steps(preview=1.0))
    assert not torch.allclose(late, dense, rtol=1e-2, atol=1e-3)


def kept(rank: int, scheme: str, bad: bool) -> tuple[int, dict[str, Tensor]]:
    """Whole numbers for gradients; in the third step one rank's may be infinite: a GradScaler skips it."""
    plan = Plan(scheme=scheme, exchange=NOW, loss_scale=4.0 if bad else None)
    run = Run(rank, plan)
    for step in range(STEPS):
        gradients = plan.gradients(step, rank)
        spoilt = bad and step == 2 and rank == 1
        if spoilt:
            gradients = [torch.full_like(each, torch.inf) for each in gradients if each is not None]
        run.optimizer.zero_grad()
        run.backward(gradients, counts=not spoilt)
        run.apply()
    exchanges = run.sync.pipeline.step
    run.sync.flush()
    run.sync.verify()
    found = {f"model/{name}": p.detach().double() for name, p in run.model.named_parameters()}
    return exchanges, found | {name: -RATE * fed for name, fed in run.seen.fed.items()}


@pytest.mark.parametrize(("scheme", "bad"), [("exdyna", False), ("stripes", False), ("exdyna", True)])
def test_nothing_is_lost_also_where_a_rank_skips_its_step(two: Ranks, scheme: str, bad: bool) -> None:
    (exchanges, first), (as_many, second) = two.run(kept, scheme, bad)
    assert exchanges == as_many == STEPS
    for name in [name for name in first if not name.startswith("model/")]:
        assert torch.equal(first[f"model/{name}"], (first[name] + second[name]) / 2)
        assert torch.equal(first[f"model/{name}"], second[f"model/{name}"])


def accumulated(rank: int) -> tuple[int, bool]:
    run = Run(rank, Plan(exchange=NOW, micro=3, steps=4)).train()
    loss = run.ddp(run.plan.gradients(4, rank))
    under_way = run.sync._pending is not None
    loss.backward()
    return run.sync.pipeline.step, under_way


def test_accumulated_gradients_have_one_exchange_and_none_is_under_way_behind_a_forward(two: Ranks) -> None:
    assert two.run(accumulated) == [(5, False), (5, False)]
