"""What an optimizer does is found by experiment, which leaves it alone; and what cannot work is refused."""

from __future__ import annotations

import copy
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

from gradsieve import optimizers
from gradsieve.errors import ConfigError
from gradsieve.optimizers import Traits, as_list, follow, traits_of

# torch has it since 2.9.
MUON = [torch.optim.Muon] if hasattr(torch.optim, "Muon") else []
NORMALISED, APART = Traits(0.0), Traits(0.0, True)
ADAM, ADAMW = Traits(0.0, has_moments=True), Traits(0.0, True, has_moments=True)
KINDS = [
    (SGD, {"momentum": 0.9}, Traits()),
    (ASGD, {}, Traits()),
    (Adam, {"weight_decay": 0.1}, ADAM),
    (Adam, {"amsgrad": True, "foreach": True}, ADAM),
    (AdamW, {}, ADAMW),
    (AdamW, {"weight_decay": 0.0}, ADAMW),
    (AdamW, {"fused": True}, ADAMW),
    (NAdam, {}, ADAM),
    (NAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True}, ADAMW),
    (RAdam, {}, ADAM),
    (Adafactor, {}, APART),
    (RMSprop, {}, NORMALISED),
    (Adagrad, {}, NORMALISED),
    (Adadelta, {}, NORMALISED),
    (Adamax, {}, NORMALISED),
    (Rprop, {}, NORMALISED),
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


def tried(optimizer: Optimizer, size: float = 256.0) -> Traits:
    return traits_of(optimizer, optimizer.param_groups[0], size)


@pytest.mark.parametrize(("kind", "settings", "traits"), KINDS)
def test_what_an_optimizer_does_is_found_by_experiment(kind: Any, settings: Any, traits: Traits) -> None:
    assert tried(kind([parameter()], lr=0.1, **settings)) == traits


@pytest.mark.parametrize(("kind", "traits"), [(SignDescent, APART), (PlainDescent, Traits())])
def test_optimizers_that_nobody_knows_are_tried_too(kind: Any, traits: Traits) -> None:
    assert tried(kind([parameter()], lr=0.1)) == traits


def test_adam_with_an_eps_above_its_gradients_is_sgd() -> None:
    optimizer = Adam([parameter()], lr=0.1, eps=1.0)
    assert tried(optimizer, 1e-5).elasticity == 1.0
    assert tried(optimizer, 1e5).elasticity == 0.0
    assert 0.1 < tried(optimizer, 1.0).elasticity < 0.9


def test_a_scaler_that_found_an_overflow_hides_nothing() -> None:
    """A GradScaler gives a fused optimizer what it found, and it then does not step."""
    optimizer = AdamW([parameter()], lr=0.1, fused=True)
    optimizer.found_inf, optimizer.grad_scale = torch.tensor(1.0), torch.tensor(65536.0)
    assert tried(optimizer) == ADAMW


def test_an_optimizer_that_cannot_be_tried_is_left_alone_and_named(caplog: pytest.LogCaptureFixture) -> None:
    assert tried(Untriable([parameter()], lr=0.1)) == Traits()
    assert "Untriable could not be tried out" in caplog.text
    assert "only one of me" in caplog.text


def test_there_is_one_experiment_although_a_schedule_changes_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = AdamW([parameter()], lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=20)
    made: list[Any] = []
    real = optimizers.Experiment.traits
    monkeypatch.setattr(optimizers.Experiment, "traits", lambda self: (made.append(1), real(self))[1])
    for _ in range(10):
        tried(optimizer)
        optimizer.step()
        schedule.step()
    assert len(made) == 1
    tried(optimizer, 1e-3)
    assert len(made) == 2
    optimizer.param_groups[0]["amsgrad"] = True
    tried(optimizer)
    assert len(made) == 3


class Adopt(Optimizer):
    """Keeps what Adam keeps under Adam's names, but `exp_avg` is the mean of gradients that are divided
    already: the step itself."""

    def __init__(self, parameters: Any, lr: float = 1e-3, eps: Any = 1e-6) -> None:
        super().__init__(parameters, {"lr": lr, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for each in group["params"]:
                state = self.state[each]
                if not state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(each), each.grad**2
                state["exp_avg"].lerp_(each.grad / state["exp_avg_sq"].sqrt().clamp_min(1e-6), 0.1)
                each.sub_(state["exp_avg"], alpha=group["lr"])
                state["exp_avg_sq"].lerp_(each.grad**2, 1e-3)


@pytest.mark.parametrize("settings", [{}, {"eps": (1e-30, 1e-3)}])
def test_moments_that_only_have_adams_names_are_told_apart(settings: Any) -> None:
    assert not tried(Adopt([parameter()], **settings)).has_moments


# -- an experiment leaves the user's optimizer alone --------------------------------------------------------


def test_it_hears_no_hook_and_keeps_parameters_state_and_schedule() -> None:
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
    assert p.grad is None
    assert torch.equal(p, before)
    assert schedule.get_last_lr() == [0.1]


class AutoClip(AdamW):
    """Clips to the median of its gradients' norms, of which the history is an attribute."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=1e-3)
        self.history: list[float] = []
        self.mean, self.calls, self.every = torch.zeros(()), {"n": 0}, list(self.param_groups[0]["params"])

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        norm = torch.stack([p.grad.norm() for p in self.every]).norm()
        self.history.append(float(norm))
        self.mean.lerp_(norm, 0.1)
        self.calls["n"] += 1
        for p in self.every:
            p.grad.mul_(min(1.0, float(torch.tensor(self.history).quantile(0.5)) / (float(norm) + 1e-9)))
        return super().step(closure)


def test_what_it_keeps_in_attributes_is_not_written() -> None:
    p = parameter()
    optimizer = AutoClip([p])
    before = p.detach().clone()
    assert tried(optimizer) == ADAMW
    assert (optimizer.history, float(optimizer.mean), optimizer.calls) == ([], 0.0, {"n": 0})
    assert p.grad is None
    assert torch.equal(p, before)


class Wrapper(Optimizer):
    """A rule around another optimizer, which does the steps."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.optimizer, self.param_groups = optimizer, optimizer.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


def test_what_it_puts_a_rule_around_is_not_stepped() -> None:
    p = parameter()
    inner = AdamW([p], lr=0.1)
    p.grad = torch.ones_like(p)
    inner.step()
    before, state = p.detach().clone(), copy.deepcopy(inner.state[p])
    optimizer = Wrapper(inner)
    assert (tried(optimizer).elasticity, tried(optimizer).decays_apart) == (0.0, True)
    assert torch.equal(p, before)
    assert all(torch.equal(inner.state[p][key], value) for key, value in state.items())


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


def test_what_it_keeps_in_its_groups_is_not_written() -> None:
    p = parameter()
    optimizer = Summing([p], lr=torch.tensor(0.1))  # type: ignore[arg-type]
    p.grad = torch.ones_like(p)
    optimizer.step()
    group = optimizer.param_groups[0]
    group["total"].fill_(7.0)
    assert tried(optimizer).elasticity == 0.0  # its rate is a tensor in the experiment too
    assert float(group["total"]) == 7.0


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_copy_of_the_weights_is_found(dtype: torch.dtype) -> None:
    optimizer = Master([nn.Parameter(parameter().detach().to(dtype))], lr=0.1)
    assert tried(optimizer).copies == ("master",)


def test_weights_that_cannot_be_followed_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"Averaged computes the parameters .*Gradients"):
        tried(Averaged([parameter()], lr=0.1))


def test_a_copy_follows_and_keeps_what_rounding_hides() -> None:
    p = nn.Parameter(torch.full((4,), 1.0, dtype=torch.bfloat16))
    optimizer = Master([p], lr=1.0)
    p.grad = torch.full_like(p, 1e-4)  # below what bfloat16 tells apart from 1
    optimizer.step()
    with torch.no_grad():
        p += 0.5  # what another rank sent
    follow(optimizer.state[p]["master"], p.detach())
    torch.testing.assert_close(optimizer.state[p]["master"], torch.full((4,), 1.5 - 1e-4), rtol=0, atol=1e-6)


# -- which optimizers cannot work ---------------------------------------------------------------------------


@pytest.fixture
def parameters() -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(torch.ones(3)) for name in ("a", "b")}


class Sam(torch.optim.Optimizer):
    """As it is usually written."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def first_step(self) -> None: ...

    def second_step(self) -> None: ...


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: torch.optim.LBFGS(p), "LBFGS evaluates its closure several times"),
        (lambda p: Sam(p), "Sam moves the parameters between two backward passes"),
        (lambda p: [], "there is no optimizer"),
        (lambda p: nn.Linear(2, 2), "Linear is not an optimizer"),
    ],
)
def test_what_cannot_work_is_refused(make: Any, words: str, parameters: dict[str, nn.Parameter]) -> None:
    with pytest.raises(ConfigError, match=words):
        as_list(make(parameters.values()))
