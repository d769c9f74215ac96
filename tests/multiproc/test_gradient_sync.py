"""`GradientSync` without DDP, on models replicated by hand; and flush, with and without DDP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import gradsieve
from multiproc.harness import Ranks
from multiproc.models import Whole
from multiproc.training import RATE, Plan, Run, Seen, check_laws, differing, usual

every_scheme = pytest.mark.parametrize("scheme", usual())


class ByHand(Run):
    """One rank's training with `reduce()` between backward and the optimizer."""

    def __init__(self, rank: int, plan: Plan, group: dist.ProcessGroup | None = None) -> None:
        self.rank, self.plan, self.seen, self.scaler = rank, plan, Seen(), None
        self.model = Whole(plan.shapes, plan.dtypes)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE)
        self.sync: Any = gradsieve.GradientSync(
            self.model.named_parameters(),
            self.optimizer,
            scheme=plan.scheme,
            density=plan.density,
            exchange=plan.exchange,
            group=group,
            bucket_cap_mb=plan.cap_mb,
        )
        self.reduced: list[bool] = []

    def backward(self, *micro_gradients: Sequence[Tensor | None], counts: bool = True) -> None:
        for gradients in micro_gradients:
            self.model(gradients).backward()
            if counts:
                self.feed(gradients)
        self.before_reduce()
        self.reduced.append(self.sync.reduce())

    def before_reduce(self) -> None:
        """For subclasses."""


def train_by_hand(rank: int, plan: Plan) -> Seen:
    run = ByHand(rank, plan).train()
    assert run.reduced == [True] * plan.steps
    return run.report()


@every_scheme
@pytest.mark.parametrize("micro", [1, 3])
def test_laws_hold_without_ddp(two: Ranks, scheme: str, micro: int) -> None:
    check_laws(two.run(train_by_hand, Plan(scheme, micro=micro)))


def train_in_groups(rank: int, plan: Plan) -> tuple[Seen, int]:
    """Ranks 0 and 2 train one model, 1 and 3 another, at the same time."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    run = ByHand(rank, plan, groups[rank % 2]).train()
    run.rank = run.sync.engine.rank  # its name in the state
    return run.report(), run.rank


@every_scheme
def test_groups_train_side_by_side(four: Ranks, scheme: str) -> None:
    seen, inner = zip(*four.run(train_in_groups, Plan(scheme)), strict=True)
    assert inner == (0, 0, 1, 1)
    check_laws(seen[0::2])
    check_laws(seen[1::2])
    assert differing(seen[0].parameters, seen[1].parameters) != []


@dataclass
class Flushed:
    seen: Seen
    """Of the whole training, the flush applied."""
    held: dict[str, Tensor]
    """Residuals before the flush."""
    gradients: dict[str, Tensor]
    """`.grad` after it."""


def train_and_flush(rank: int, plan: Plan, kind: type[Run], skip: bool) -> Flushed:
    """With `skip`, the last step before the flush is a bad one."""
    run = kind(rank, plan).train()
    if skip:
        bad = plan.gradients(99, rank)
        if rank == 0:
            bad[0][3, 3] = float("inf")  # type: ignore[index]
        run.optimizer.zero_grad()
        run.backward(bad, counts=False)
        run.apply()
        assert not run.sync.pipeline.last_step_good
    held = run.report().residuals
    run.sync.flush()
    gradients = {name: p.grad.clone() for name, p in run.model.named_parameters() if p.grad is not None}
    run.scaler = None  # what flush leaves is not scaled
    run.apply()
    return Flushed(run.report(), held, gradients)


@every_scheme
@pytest.mark.parametrize(
    ("kind", "skip"), [(Run, True), (ByHand, False)], ids=["DDP, after a skipped step", "by hand"]
)
def test_flush_applies_the_mean_of_what_was_held_back(
    two: Ranks, scheme: str, kind: type[Run], skip: bool
) -> None:
    answers = two.run(train_and_flush, Plan(scheme), kind, skip)
    check_laws([answer.seen for answer in answers])
    for answer in answers:
        assert not any(int(part.count_nonzero()) for part in answer.seen.residuals.values())
        for name, gradient in answer.gradients.items():
            held = [each.held[name] for each in answers if name in each.held]
            mean = torch.stack(held).mean(0) if held else torch.zeros_like(gradient)
            assert torch.equal(gradient, mean), name
