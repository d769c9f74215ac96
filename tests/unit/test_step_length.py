"""How long an adaptive optimizer's step is: which optimizers normalise, what a step then is, who agrees."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
)

from gradsieve.feedback.step_length import Habit, StepLength, habit_of

MUON = [torch.optim.Muon] if hasattr(torch.optim, "Muon") else []
"""torch has it since 2.9."""
APART, TOGETHER, NOT = Habit(True, True), Habit(True, False), Habit(False)
HABITS = [
    (SGD, {"momentum": 0.9, "weight_decay": 0.1}, NOT),
    (ASGD, {}, NOT),
    (Adam, {"weight_decay": 0.1}, TOGETHER),
    (AdamW, {}, APART),
    (AdamW, {"weight_decay": 0.0}, APART),
    (NAdam, {}, TOGETHER),
    (NAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True}, APART),
    (RAdam, {}, TOGETHER),
    (Adafactor, {}, APART),
    (RMSprop, {}, TOGETHER),
    (Adagrad, {}, TOGETHER),
    (Adadelta, {}, TOGETHER),
    (Adamax, {}, TOGETHER),
    *((muon, {}, APART) for muon in MUON),
]


class SignDescent(Optimizer):
    """Of nobody's list: its steps are signs, and decay is apart."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(p.grad.sign(), alpha=group["lr"])


class PlainDescent(SignDescent):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"])


class Untriable(SignDescent):
    def __setstate__(self, state: Any) -> None:
        raise RuntimeError("there is only one of me")


def parameter() -> nn.Parameter:
    return nn.Parameter(torch.linspace(1.0, 2.0, 12).view(3, 4))


@pytest.mark.parametrize(("kind", "settings", "habit"), HABITS)
def test_what_an_optimizer_does_is_found_by_trying_it(kind: Any, settings: Any, habit: Habit) -> None:
    optimizer = kind([parameter()], lr=0.1, **settings)
    assert habit_of(optimizer, optimizer.param_groups[0]) == habit


@pytest.mark.parametrize(("kind", "habit"), [(SignDescent, APART), (PlainDescent, NOT)])
def test_optimizers_that_nobody_knows_are_tried_too(kind: Any, habit: Habit) -> None:
    optimizer = kind([parameter()], lr=0.1)
    assert habit_of(optimizer, optimizer.param_groups[0]) == habit


def test_a_trial_leaves_the_optimizer_and_its_schedule_as_they_were() -> None:
    p = parameter()
    optimizer = AdamW([p], lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    calls: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append(1))
    before = p.detach().clone()
    habit_of(optimizer, optimizer.param_groups[0])
    assert not calls
    assert not optimizer.state
    assert torch.equal(p, before)
    assert schedule.get_last_lr() == [0.1]


def test_a_rate_of_nothing_at_first_hides_no_habit() -> None:
    """Warm-ups begin there."""
    optimizer = AdamW([parameter()], lr=0.0)
    assert habit_of(optimizer, optimizer.param_groups[0]) == APART


def test_an_optimizer_that_cannot_be_tried_is_left_alone_and_named(caplog: pytest.LogCaptureFixture) -> None:
    optimizer = Untriable([parameter()], lr=0.1)
    assert habit_of(optimizer, optimizer.param_groups[0]) == NOT
    assert "Untriable could not be tried out" in caplog.text
    assert "only one of me" in caplog.text


def moved(kind: Any, factor: float, gradient: Tensor, **settings: Any) -> Tensor:
    p = parameter()
    optimizer, length = kind([p], **settings), StepLength()
    before = p.detach().clone()
    p.grad = gradient.clone()
    length.begin(optimizer, factor)
    optimizer.step()
    length.end()
    assert {name: optimizer.param_groups[0][name] for name in settings} == settings
    return p.detach() - before


@pytest.mark.parametrize("kind", [Adam, AdamW, RMSprop, NAdam, *MUON, SignDescent])
def test_steps_of_those_that_normalise_are_as_long_as_asked(kind: Any) -> None:
    gradient = torch.randn(3, 4)
    plain, longer = (moved(kind, factor, gradient, lr=0.01, weight_decay=0.0) for factor in (1.0, 2.0))
    torch.testing.assert_close(longer, 2 * plain, rtol=1e-3, atol=1e-6)


def test_steps_of_sgd_stay_as_they_are() -> None:
    gradient = torch.randn(3, 4)
    assert torch.equal(*(moved(SGD, factor, gradient, lr=0.01) for factor in (1.0, 2.0)))


@pytest.mark.parametrize("kind", [AdamW, SignDescent])
def test_decoupled_decay_stays_as_it_is(kind: Any) -> None:
    decay = {"lr": 0.01, "weight_decay": 0.5}
    gradient = torch.randn(3, 4)
    alone = moved(kind, 1.0, gradient, lr=0.01, weight_decay=0.0)
    both = moved(kind, 2.0, gradient, **decay)
    shrunk = -0.01 * 0.5 * parameter().detach()
    torch.testing.assert_close(both, 2 * alone + shrunk, rtol=1e-3, atol=1e-6)


def test_a_step_that_broke_off_leaves_no_rate_behind() -> None:
    optimizer, length = AdamW([parameter()], lr=0.01), StepLength()
    length.begin(optimizer, 2.0)
    assert optimizer.param_groups[0]["lr"] == 0.02
    length.begin(optimizer, 3.0)  # the step before raised, so that nobody said it ended
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.03)
    optimizer.param_groups[0]["lr"] = 0.5  # the user's, within the step
    length.end()
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert optimizer.param_groups[0]["weight_decay"] == 0.01


def test_every_group_has_its_own_habit() -> None:
    """As optimizers that give matrices and vectors different treatment have it."""
    vector, matrix = nn.Parameter(torch.ones(5)), parameter()
    optimizer = AdamW([{"params": [matrix]}, {"params": [vector], "weight_decay": 0.0}], lr=0.1)
    length = StepLength()
    assert length.habits(optimizer) == [APART, APART]
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, 2, 2))]})
    assert len(length.habits(optimizer)) == 3


def test_the_root_of_the_noise_is_what_lengthens() -> None:
    """Where noise rules, Adam of P ranks' own gradients makes sqrt(P) less way than Adam of their mean."""
    world, n = 4, 4096
    source = torch.Generator().manual_seed(0)
    ways = {}
    for ranks in (1, world):
        models = [nn.Parameter(torch.zeros(n)) for _ in range(ranks)]
        optimizers = [Adam([model], lr=0.01) for model in models]
        source.manual_seed(0)
        for _ in range(50):
            noise = torch.randn(world, n, generator=source)
            given = noise if ranks > 1 else noise.mean(0, keepdim=True)
            for model, optimizer, gradient in zip(models, optimizers, given, strict=True):
                model.grad = gradient.clone()
                optimizer.step()
        ways[ranks] = float(torch.stack([model.detach() for model in models]).mean(0).norm())
    assert ways[1] / ways[world] == pytest.approx(math.sqrt(world), rel=0.05)
