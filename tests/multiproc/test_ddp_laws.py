"""Behind DDP, on real processes: no gradient is lost, replicas are the same bits, and so is lockstep."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import pytest
import torch

from gradsieve.hooks import hook_of
from gradsieve.pipeline.gradients import Residual
from multiproc.harness import Ranks
from multiproc.training import (
    Plan,
    Run,
    Seen,
    Virtual,
    check_laws,
    check_nothing_lost,
    differing,
    typical,
    usual,
)

every_way = pytest.mark.parametrize("scheme", typical())
every_scheme = pytest.mark.parametrize("scheme", usual())


def train(rank: int, plan: Plan) -> Seen:
    return Run(rank, plan).train().report()


@every_scheme
@pytest.mark.parametrize("world", [2, 4])
def test_nothing_is_lost_and_replicas_are_the_same_bits(
    pool: Callable[[int], Ranks], scheme: str, world: int
) -> None:
    seen = pool(world).run(train, Plan(scheme, steps=8))
    check_laws(seen)
    assert seen[0].units >= 3


@every_way
def test_real_processes_give_what_lockstep_gives(four: Ranks, scheme: str) -> None:
    plan = Plan(scheme, steps=8)
    virtual = Virtual(plan, 4).train()
    check_laws(virtual)
    for real, expected in zip(four.run(train, plan), virtual, strict=True):
        assert differing(real.parameters, expected.parameters) == []
        assert differing(real.residuals, expected.residuals) == []


def train_forgetting(rank: int, plan: Plan) -> Seen:
    """Rank 1 drops one element of what it did not send, in one step."""
    run = Run(rank, plan).train(3)
    if rank == 1:
        kept = next(iter(run.sync.pipeline.residuals()))
        kept[kept.nonzero()[0]] = 0
    return run.train(3).report()


def train_spending_nothing(rank: int, plan: Plan) -> Seen:
    """Sent elements stay in the residual and are sent again: gradients are made up."""
    with mock.patch.object(Residual, "commit", lambda self, spent: self.kept.copy_(self._staged)):
        return train(rank, plan)


@pytest.mark.parametrize("sabotage", [train_forgetting, train_spending_nothing])
def test_lost_and_made_up_gradients_are_seen(two: Ranks, sabotage: Callable[[int, Plan], Seen]) -> None:
    with pytest.raises(AssertionError, match="lost or made up"):
        check_nothing_lost(two.run(sabotage, Plan()))


def train_and_watch_buckets(rank: int, plan: Plan) -> tuple[Seen, list[list[list[str]]]]:
    """Also: the names in each bucket, step by step."""
    run = Run(rank, plan)
    names = {parameter: name for name, parameter in run.model.named_parameters()}
    steps: list[list[list[str]]] = []
    comm_hook = hook_of(run.ddp)
    assert comm_hook is not None
    assert comm_hook.hand_over is not None
    usual = comm_hook.hand_over

    def watched(bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
        if bucket.index() == 0:
            steps.append([])
        steps[-1].append([names[parameter] for parameter in bucket.parameters()])
        return usual(bucket)

    comm_hook.hand_over = watched
    return run.train().report(), steps


@every_scheme
@pytest.mark.parametrize("cap_mb", [0.01, 1])
def test_residuals_survive_the_rebuilding_of_buckets(two: Ranks, scheme: str, cap_mb: float) -> None:
    plan = Plan(scheme, cap_mb=cap_mb)
    answers = two.run(train_and_watch_buckets, plan)
    seen, steps = [answer[0] for answer in answers], answers[0][1]
    check_laws(seen)
    assert steps[0] != steps[1], "DDP did not rebuild its buckets: the test shows nothing"
    virtual = Virtual(plan, 2).train()
    assert differing(seen[0].parameters, virtual[0].parameters) == []


def train_accumulating(rank: int, plan: Plan) -> tuple[Seen, int]:
    """Also: how many steps were exchanged."""
    run = Run(rank, plan).train()
    return run.report(), run.sync.pipeline.step


def train_on_the_sum(rank: int, plan: Plan) -> Seen:
    """One backward pass a step, with the sum of what the micro steps would have given."""
    run = Run(rank, replace(plan, micro=1))
    for step in range(plan.steps):
        micros = [plan.gradients(step, rank, micro) for micro in range(plan.micro)]
        run.step([torch.stack(parts).sum(0) for parts in zip(*micros, strict=True)])
    return run.report()


@every_scheme
@pytest.mark.parametrize(
    ("micro", "ddp"),
    [(1, {}), (2, {"gradient_as_bucket_view": True}), (5, {})],
    ids=["1 copied", "2 viewed", "5 copied"],
)
def test_accumulated_gradients_are_exchanged_once(
    two: Ranks, scheme: str, micro: int, ddp: dict[str, bool]
) -> None:
    plan = Plan(scheme, steps=5, micro=micro, ddp=ddp)
    seen, steps = zip(*two.run(train_accumulating, plan), strict=True)
    check_laws(seen)
    assert steps == (5, 5)
    if micro > 1:
        summed = two.run(train_on_the_sum, plan)
        assert differing(seen[0].parameters, summed[0].parameters) == []
