"""A value that is not finite, on one rank: every rank skips that step, and it is as if it had never been."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from multiproc.harness import Ranks
from multiproc.training import (
    Plan,
    Run,
    Seen,
    check_nothing_lost,
    check_replicas,
    differing,
    snapshot,
    usual,
)

every_scheme = pytest.mark.parametrize("scheme", usual())
BAD_STEP, BAD_RANK, STEPS = 10, 1, 15
SPARSE, DENSE = 3, 1
"""Places in `Whole` of a tensor that goes sparse and of one that goes dense."""


@dataclass
class Skipping:
    """One rank's way through a training with one bad step."""

    seen: Seen
    changed: list[str]
    """What the bad step changed."""
    idle: list[int]
    """Other steps that changed no parameter."""
    skipped: int
    scales: list[float]
    """Of the loss, before each step."""


def train_with_a_bad_step(rank: int, plan: Plan, bad: float, place: int) -> Skipping:
    run = Run(rank, plan)
    changed, idle, scales = [], [], []
    for step in range(STEPS):
        gradients = plan.gradients(step, rank)
        if step == BAD_STEP and rank == BAD_RANK:
            gradients[place].view(-1)[17] = bad  # type: ignore[union-attr]
        before = snapshot(run)
        scales.append(1.0 if run.scaler is None else run.scaler.get_scale())
        run.optimizer.zero_grad()
        run.backward(gradients, counts=step != BAD_STEP)
        run.apply()
        names = differing(before, snapshot(run))
        if step == BAD_STEP:
            changed = names
        elif not any(name.startswith("parameter/") for name in names):
            idle.append(step)
    return Skipping(run.report(), changed, idle, run.sync.pipeline.skipped, scales)


def check_skipped(answers: Sequence[Skipping]) -> None:
    for rank, answer in enumerate(answers):
        assert answer.changed == [], f"rank {rank}: the bad step changed {answer.changed}"
        assert answer.skipped == 1, f"rank {rank} skipped {answer.skipped} steps"
        assert answer.idle == [], f"rank {rank} did nothing in steps {answer.idle}"
        assert int(answer.seen.state["step"]) == STEPS - 1
    check_replicas([answer.seen for answer in answers])


MEMORY = {"momentum": 0.5, "weight_decay": 0.25}
"""A step that only zeroed the gradients would show in both."""


@every_scheme
@pytest.mark.parametrize(
    ("bad", "place"), [(float("nan"), SPARSE), (float("inf"), DENSE)], ids=["nan, sparse", "inf, dense"]
)
def test_a_bad_value_on_one_rank_skips_the_step_on_all(
    two: Ranks, scheme: str, bad: float, place: int
) -> None:
    plan = Plan(scheme, memory=MEMORY)
    answers = two.run(train_with_a_bad_step, plan, bad, place)
    check_skipped(answers)
    check_nothing_lost([answer.seen for answer in answers])


@every_scheme
def test_a_grad_scaler_backs_off_on_all_ranks(two: Ranks, scheme: str) -> None:
    """The scale doubles every fourth step, so that residuals meet gradients of other units than their own."""
    plan = Plan(scheme, memory=MEMORY, loss_scale=1024.0)
    answers = two.run(train_with_a_bad_step, plan, float("inf"), SPARSE)
    check_skipped(answers)
    for answer in answers:
        assert answer.scales == [1024.0] * 4 + [2048.0] * 4 + [4096.0] * 3 + [2048.0] * 4
    check_nothing_lost([answer.seen for answer in answers])
