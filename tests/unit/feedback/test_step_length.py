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
    Rprop,
)
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gradsieve.errors import ConfigError
from gradsieve.feedback import step_length
from gradsieve.feedback.step_length import Habit, StepLength, copies_of, habit_of

MUON = [torch.optim.Muon] if hasattr(torch.optim, "Muon") else []
"""torch has it since 2.9."""
APART, TOGETHER, NOT = Habit(0.0, True), Habit(0.0, False), Habit(1.0)
HABITS = [
    (ASGD, {}, NOT),
    (Adam, {"weight_decay": 0.1}, TOGETHER),
    (AdamW, {}, APART),
    (AdamW, {"weight_decay": 0.0}, APART),
    (AdamW, {"fused": True}, APART),
    (NAdam, {}, TOGETHER),
    (NAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True}, APART),
    (RAdam, {}, TOGETHER),
    (Adafactor, {}, APART),
    (RMSprop, {}, TOGETHER),
    (Adagrad, {}, TOGETHER),
    (Adadelta, {}, TOGETHER),
    (Adamax, {}, TOGETHER),
    (Rprop, {}, TOGETHER),
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


def tried(optimizer: Optimizer, size: float = 1.0) -> Habit | None:
    return habit_of(optimizer, optimizer.param_groups[0], size)


@pytest.mark.parametrize(("kind", "settings", "habit"), HABITS)
def test_what_an_optimizer_does_is_found_by_trying_it(kind: Any, settings: Any, habit: Habit) -> None:
    assert tried(kind([parameter()], lr=0.1, **settings)) == habit


@pytest.mark.parametrize(("kind", "habit"), [(SignDescent, APART), (PlainDescent, NOT)])
def test_optimizers_that_nobody_knows_are_tried_too(kind: Any, habit: Habit) -> None:
    assert tried(kind([parameter()], lr=0.1)) == habit


def test_adam_with_an_eps_above_its_gradients_is_sgd() -> None:
    optimizer = Adam([parameter()], lr=0.1, eps=1.0)
    assert tried(optimizer, 1e-3) == NOT
    assert tried(optimizer, 1e3) == TOGETHER
    between = tried(optimizer, 1.0)
    assert between is not None
    assert 0.1 < between.elasticity < 0.9


def test_a_trial_leaves_the_optimizer_and_its_schedule_as_they_were() -> None:
    p = parameter()
    optimizer = AdamW([p], lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    calls: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append(1))
    everywhere = register_optimizer_step_pre_hook(lambda *_: calls.append(2))
    before = p.detach().clone()
    tried(optimizer)
    everywhere.remove()
    assert not calls
    assert not optimizer.state
    assert torch.equal(p, before)
    assert schedule.get_last_lr() == [0.1]


def test_a_rate_of_nothing_at_first_hides_no_habit() -> None:
    """Warm-ups begin there."""
    assert tried(AdamW([parameter()], lr=0.0)) == APART


def test_a_scaler_that_found_an_overflow_hides_no_habit() -> None:
    """A GradScaler gives a fused optimizer what it found, and it then does not step."""
    optimizer = AdamW([parameter()], lr=0.1, fused=True)
    optimizer.found_inf, optimizer.grad_scale = torch.tensor(1.0), torch.tensor(65536.0)
    assert tried(optimizer) == APART


def test_an_optimizer_that_cannot_be_tried_is_left_alone_and_named(caplog: pytest.LogCaptureFixture) -> None:
    optimizer = Untriable([parameter()], lr=0.1)
    assert tried(optimizer) is None
    assert "Untriable could not be tried out" in caplog.text
    assert "only one of me" in caplog.text
    assert StepLength({}).habit(optimizer, optimizer.param_groups[0], 1.0) == NOT


# -- a step -----------------------------------------------------------------------------------------------


def moved(kind: Any, rho: float, gradient: Tensor, **settings: Any) -> Tensor:
    p = parameter()
    optimizer, length = kind([p], **settings), StepLength({"p": p.data.view(-1)})
    before = p.detach().clone()
    p.grad = gradient.clone()
    length.begin(optimizer, [["p"]], rho, 1.0)
    assert {name: optimizer.param_groups[0][name] for name in settings} == settings, "the user's settings"
    optimizer.step()
    length.end()
    assert {name: optimizer.param_groups[0][name] for name in settings} == settings
    return p.detach() - before


@pytest.mark.parametrize("kind", [Adam, AdamW, RMSprop, NAdam, *MUON, SignDescent])
def test_steps_of_those_that_normalise_are_as_long_as_asked(kind: Any) -> None:
    gradient = torch.randn(3, 4)
    plain, longer = (moved(kind, rho, gradient, lr=0.01, weight_decay=0.0) for rho in (1.0, 0.25))
    torch.testing.assert_close(longer, 2 * plain, rtol=1e-3, atol=1e-6)


def test_steps_of_sgd_stay_as_they_are() -> None:
    gradient = torch.randn(3, 4)
    assert torch.equal(*(moved(SGD, rho, gradient, lr=0.01) for rho in (1.0, 0.25)))


@pytest.mark.parametrize("kind", [AdamW, SignDescent])
def test_decoupled_decay_stays_as_it_is(kind: Any) -> None:
    decay = {"lr": 0.01, "weight_decay": 0.5}
    gradient = torch.randn(3, 4)
    alone = moved(kind, 1.0, gradient, lr=0.01, weight_decay=0.0)
    both = moved(kind, 0.25, gradient, **decay)
    shrunk = -0.01 * 0.5 * parameter().detach()
    torch.testing.assert_close(both, 2 * alone + shrunk, rtol=1e-3, atol=1e-6)


def test_a_rate_of_zero_moves_nothing_however_long_the_step() -> None:
    assert not moved(AdamW, 0.25, torch.randn(3, 4), lr=0.0, weight_decay=0.5).any()


def test_a_step_that_a_scaler_called_off_moves_nothing() -> None:
    p = parameter()
    before = p.detach().clone()
    optimizer, length = AdamW([p], lr=0.1, weight_decay=0.5, fused=True), StepLength({"p": p.data.view(-1)})
    optimizer.found_inf, optimizer.grad_scale = torch.tensor(1.0), torch.tensor(2.0)
    p.grad = torch.ones(3, 4)
    length.begin(optimizer, [["p"]], 0.25, 1.0)
    optimizer.step()
    length.end()
    assert torch.equal(p, before)


def test_a_step_that_broke_off_is_forgotten() -> None:
    p = parameter()
    optimizer, length = AdamW([p], lr=0.01, weight_decay=0.0), StepLength({"p": p.data.view(-1)})
    p.grad = torch.ones(3, 4)
    length.begin(optimizer, [["p"]], 0.25, 1.0)
    with torch.no_grad():
        p += 100.0  # the step raised after it had written
    before = p.detach().clone()
    length.begin(optimizer, [["p"]], 0.25, 1.0)
    optimizer.step()
    length.end()
    torch.testing.assert_close(p.detach() - before, torch.full((3, 4), -0.02), rtol=1e-2, atol=1e-4)


def test_every_group_has_its_own_habit() -> None:
    """As optimizers that give matrices and vectors different treatment have it."""
    vector, matrix = nn.Parameter(torch.ones(5)), parameter()
    optimizer = AdamW([{"params": [matrix]}, {"params": [vector], "eps": 1e6}], lr=0.1)
    length = StepLength({})
    assert [length.habit(optimizer, group, 1.0) for group in optimizer.param_groups] == [APART, NOT]


# -- optimizers that keep the weights elsewhere -----------------------------------------------------------


class Master(SignDescent):
    """The usual for bfloat16: steps are made in float32, beside the parameters."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                master = self.state[p].setdefault("master", p.detach().float().clone())
                master.sub_(p.grad.float(), alpha=group["lr"])
                p.copy_(master)


class Averaged(SignDescent):
    """As Schedule-Free: the parameters are between two sequences of which it keeps one."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                z = state.setdefault("z", p.detach().clone())
                state["k"] = state.get("k", 0) + 1
                z.sub_(p.grad, alpha=group["lr"])
                p.lerp_(z, 1 / state["k"])


class Lookahead(SignDescent):
    """Every fifth step it goes half of the way back."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                slow = state.setdefault("slow", p.detach().clone())
                p.sub_(p.grad, alpha=group["lr"])
                state["k"] = state.get("k", 0) + 1
                if state["k"] % 5 == 0:
                    slow.lerp_(p, 0.5)
                    p.copy_(slow)


@pytest.mark.parametrize(("kind", "settings", "habit"), HABITS)
def test_moves_survive_in_torchs_own(kind: Any, settings: Any, habit: Habit) -> None:
    optimizer = kind([parameter()], lr=0.1, **settings)
    assert copies_of(optimizer, optimizer.param_groups[0]) == ()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_copy_of_the_weights_is_found(dtype: torch.dtype) -> None:
    optimizer = Master([nn.Parameter(parameter().detach().to(dtype))], lr=0.1)
    assert copies_of(optimizer, optimizer.param_groups[0]) == ("master",)


@pytest.mark.parametrize("kind", [Averaged, Lookahead])
def test_weights_that_nobody_can_follow_are_refused_by_name(kind: Any) -> None:
    optimizer = kind([parameter()], lr=0.1)
    with pytest.raises(ConfigError, match=f"{kind.__name__} computes the parameters .*Gradients"):
        copies_of(optimizer, optimizer.param_groups[0])


class Summing(SignDescent):
    """As Prodigy: a running sum of all steps lies in the group, and is written in place."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if not isinstance(group["lr"], Tensor):  # as torchao's
                raise TypeError("the rate is no tensor")
            total = group.setdefault("total", torch.zeros(1))
            for p in group["params"]:
                total += p.grad.abs().sum()
                p.sub_(p.grad.sign(), alpha=float(group["lr"]))


def summing_after_trials() -> tuple[float, Habit | None]:
    p = parameter()
    optimizer = Summing([p], lr=torch.tensor(0.1))  # type: ignore[arg-type]
    p.grad = torch.ones_like(p)
    optimizer.step()
    group = optimizer.param_groups[0]
    group["total"].fill_(7.0)
    copies_of(optimizer, group)
    return float(group["total"]), habit_of(optimizer, group, 1.0)


def test_trials_write_nothing_that_an_optimizer_keeps_in_its_groups() -> None:
    total, habit = summing_after_trials()
    assert total == 7.0
    assert habit is not None  # its rate is a tensor in trials too
    assert habit.elasticity == 0.0


def test_groups_that_are_not_copied_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin: Prodigy's rate stayed where it began."""
    monkeypatch.setattr(step_length.copy, "deepcopy", lambda each: each)
    assert summing_after_trials()[0] != 7.0


def test_a_copy_follows_and_keeps_what_rounding_hides() -> None:
    p = nn.Parameter(torch.full((4,), 1.0, dtype=torch.bfloat16))
    optimizer, length = Master([p], lr=1.0), StepLength({})
    p.grad = torch.full_like(p, 1e-4)  # below what bfloat16 tells apart from 1
    optimizer.step()
    with torch.no_grad():
        p += 0.5  # what another rank sent
    length.bring_along(optimizer)
    torch.testing.assert_close(optimizer.state[p]["master"], torch.full((4,), 1.5 - 1e-4), rtol=0, atol=1e-6)


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
