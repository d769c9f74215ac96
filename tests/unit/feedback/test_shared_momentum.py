"""A rank's own noise in its optimizer's momentum: what it is, what is taken out, and from whom."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam

from gradsieve import Steps
from gradsieve.feedback import local_steps, shared_momentum, step_length
from gradsieve.feedback.shared_momentum import FEWEST, PART, Moments, has_moments, take_out
from gradsieve.feedback.step_length import StepLength
from gradsieve.pipeline import steps
from gradsieve.schemes import make
from gradsieve.testing import StepPipeline, adapt, lockstep

WORLD, N = 8, 3000


def drawn(seed: int, count: int = 200) -> tuple[Tensor, Tensor, Tensor]:
    """Moments and noise."""
    source = torch.Generator().manual_seed(seed)
    first, noise = torch.randn(2, count, generator=source)
    return first, torch.rand(count, generator=source) + 0.1, noise


# -- what is taken out ----------------------------------------------------------------------------------


@given(seed=st.integers(0, 1 << 20), size=st.floats(1e-6, 1e6))
def test_of_where_momentum_leads_a_part_of_its_noise_is_left_and_nothing_grows(
    seed: int, size: float
) -> None:
    first, second, noise = drawn(seed)
    noise *= size
    leads, direction = first / second.sqrt(), noise / noise.norm()
    before = float(leads @ direction)
    rest = leads - before * direction
    take_out([(first, second, noise)], 0.0)
    after = first / second.sqrt()
    left = float(after @ direction)
    assert left == pytest.approx((1 - PART) * before if before > 0 else before, abs=1e-4)
    torch.testing.assert_close(after - left * direction, rest, rtol=0, atol=1e-4)
    assert after.norm() <= leads.norm() + 1e-4


@pytest.mark.parametrize("noise", [0.0, float("inf"), float("nan")])
def test_noise_that_cannot_be_measured_changes_nothing(noise: float) -> None:
    first, second, _ = drawn(0)
    before = first.clone()
    seen = torch.zeros_like(first)
    seen[7] = noise
    take_out([(first, second, seen)], 1e-8)
    others = torch.arange(len(first)) != 7
    assert torch.equal(first[others], before[others])
    assert noise != 0.0 or torch.equal(first, before)


def test_moments_in_a_narrow_type_lose_as_much() -> None:
    first, second, noise = drawn(0)
    narrow = first.bfloat16(), second.bfloat16()
    take_out([(first, second, noise)], 1e-8)
    take_out([(*narrow, noise)], 1e-8)
    torch.testing.assert_close(narrow[0].float(), first, rtol=0.02, atol=0.02)


# -- from whom ------------------------------------------------------------------------------------------


class Unknown(SGD):
    """Keeps what Adam keeps under names of its own, and cannot be copied."""

    def __setstate__(self, state: Any) -> None:
        raise RuntimeError("there is only one of me")


@pytest.mark.parametrize(
    ("optimizer", "settings", "has"),
    [
        (Adam, {}, True),
        (AdamW, {}, True),
        (AdamW, {"fused": True}, True),
        (AdamW, {"foreach": True, "amsgrad": True}, True),
        (NAdam, {}, True),
        (RAdam, {}, True),
        (Adamax, {}, False),
        (SGD, {"momentum": 0.9}, False),
        (Unknown, {}, False),
    ],
)
def test_who_has_adams_moments_is_found_by_trial(
    optimizer: type[Optimizer], settings: dict[str, Any], has: bool
) -> None:
    parameter = nn.Parameter(torch.ones(3, 4))
    made: Any = optimizer([parameter], lr=1e-3, **settings)  # type: ignore[call-arg]
    assert has_moments(made) is has
    assert torch.equal(parameter, torch.ones(3, 4))
    assert not made.state


def test_a_transposed_parameter_has_its_moments_in_its_own_order() -> None:
    values = torch.arange(512.0).view(16, 32).t().clone(memory_format=torch.preserve_format)
    parameter = nn.Parameter(values)
    assert parameter.stride() == (1, 32)
    optimizer = AdamW([parameter], lr=1e-3)
    parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    state = optimizer.state[parameter]
    in_memory = (state["exp_avg"].t().flatten() / (state["exp_avg_sq"].t().flatten().sqrt() + 1e-8)).clone()
    Moments({"p": parameter}).take_out(optimizer, [([("p", slice(128, 256))], in_memory[128:256].clone())])
    after = state["exp_avg"].t().flatten() / (state["exp_avg_sq"].t().flatten().sqrt() + 1e-8)
    torch.testing.assert_close(after[128:256], (1 - PART) * in_memory[128:256])
    assert torch.equal(after[:128], in_memory[:128])
    assert torch.equal(after[256:], in_memory[256:])


@pytest.mark.parametrize("count", [1, 4, FEWEST - 1, FEWEST])
def test_of_few_elements_nothing_is_taken_out(count: int) -> None:
    """By chance their noise explains what all ranks have: of a scalar all of it."""
    parameter = nn.Parameter(torch.ones(count))
    optimizer = AdamW([parameter], lr=1e-3)
    parameter.grad = torch.ones(count)
    optimizer.step()
    first = optimizer.state[parameter]["exp_avg"]
    before = first.clone()
    Moments({"p": parameter}).take_out(optimizer, [([("p", slice(0, count))], torch.ones(count))])
    assert torch.equal(first, before) is (count < FEWEST)


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


def test_moments_that_only_have_adams_names_are_left_alone_whoever_else_has_them() -> None:
    parameters = {name: nn.Parameter(torch.ones(100)) for name in ("adopt", "pair", "adam")}
    makers = {"adopt": Adopt, "pair": partial(Adopt, eps=(1e-30, 1e-3)), "adam": AdamW}
    optimizers: dict[str, Any] = {name: makers[name]([each]) for name, each in parameters.items()}
    assert {name: has_moments(each) for name, each in optimizers.items()} == {
        "adopt": False,
        "pair": False,
        "adam": True,
    }
    moments = Moments(parameters)
    for name, optimizer in optimizers.items():
        parameters[name].grad = torch.logspace(-2, 2, 100)
        optimizer.step()
        first = optimizer.state[parameters[name]]["exp_avg"]
        before = first.clone()
        moments.take_out(optimizer, [([(name, slice(0, 100))], torch.ones(100))])
        assert torch.equal(first, before) is (name != "adam")


def test_any_group_that_steps_along_its_moments_is_enough() -> None:
    frozen = nn.Parameter(torch.ones(9, dtype=torch.uint8), requires_grad=False)
    parameter = nn.Parameter(torch.ones(100))
    optimizer = AdamW([{"params": [frozen]}, {"params": [parameter]}], lr=1e-3)
    assert has_moments(optimizer)
    parameter.grad = torch.ones(100)
    optimizer.step()
    first = optimizer.state[parameter]["exp_avg"]
    before = first.clone()
    moments = Moments({"frozen": frozen, "p": parameter})
    moments.take_out(optimizer, [([("p", slice(0, 100))], torch.ones(100))])
    assert not torch.equal(first, before)


def test_an_optimizer_is_tried_out_once_although_a_schedule_changes_its_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parameter = nn.Parameter(torch.ones(100))
    optimizer = AdamW([parameter], lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=20)
    moments, length = Moments({"p": parameter}), StepLength({"p": parameter.detach()})
    trials: list[Any] = []
    real = step_length.Trial.__init__
    monkeypatch.setattr(step_length.Trial, "__init__", lambda *given: (trials.append(1), real(*given))[1])
    for step in range(10):
        parameter.grad = torch.ones(100)
        moments.take_out(optimizer, [([("p", slice(0, 100))], torch.ones(100))])
        length.begin(optimizer, [["p"]], 0.5, 1.0)
        optimizer.step()
        length.end()
        schedule.step()
        if step == 0:
            first = len(trials)
    assert first == len(trials) > 0


# -- what is noise --------------------------------------------------------------------------------------


class Rank:
    """One of a few with AdamW, whose gradients are the same for all but for noise that is four times as
    large."""

    def __init__(self, rank: int, density: float, **settings: Any) -> None:
        start = torch.linspace(-1, 1, N)
        self.parameters = {"p": nn.Parameter(start[:1000].clone()), "q": nn.Parameter(start[1000:].clone())}
        self.optimizer = AdamW(self.parameters.values(), lr=1e-3)
        scheme = make("stripes", density=density)
        self.adapter = adapt(self.parameters, [self.optimizer], scheme, Steps(**settings), rank, WORLD)
        assert isinstance(self.adapter.pipeline, StepPipeline)
        self.pipeline = self.adapter.pipeline
        self.alike, self.own = torch.Generator().manual_seed(99), torch.Generator().manual_seed(rank)
        self.moved = torch.zeros(N)

    @property
    def model(self) -> Tensor:
        return torch.cat([self.pipeline.own[slot.name] for slot in self.pipeline.units[0].sparse]).clone()

    @property
    def momentum(self) -> Tensor:
        states = [self.optimizer.state[each] for each in self.parameters.values()]
        return torch.cat([state["exp_avg"] / (state["exp_avg_sq"].sqrt() + 1e-8) for state in states])

    def step(self) -> None:
        for parameter in self.parameters.values():
            size = parameter.shape
            parameter.grad = torch.randn(size, generator=self.alike)
            parameter.grad += 4 * torch.randn(size, generator=self.own)
        self.adapter.before_update(self.optimizer, self.parameters.keys())
        before = self.model
        self.optimizer.step()
        self.adapter.after_update()
        self.moved += before - self.model


def exchange(ranks: list[Rank], everything: bool = False) -> Tensor:
    """What all ranks moved in the mean, of all that was exchanged."""
    (local, *_), before = ranks[0].pipeline.local, ranks[0].pipeline.local[0].shared.clone()
    tensors = [rank.adapter.tensors() for rank in ranks]
    programs = [r.pipeline.program(0, own, everything) for r, own in zip(ranks, tensors, strict=True)]
    lockstep.run(programs)
    for rank, own in zip(ranks, tensors, strict=True):
        rank.adapter.finish(own)
    return before - local.shared


@pytest.mark.parametrize("density", [0.3, 0.1])
def test_noise_is_what_a_rank_moved_and_the_others_did_not(density: float) -> None:
    ranks = [Rank(number, density) for number in range(WORLD)]
    for _ in range(25):
        mean = exchange(ranks)
        update = ranks[0].pipeline.outcomes[0].update
        here = slice(update.start, update.stop)
        for rank in ranks:
            (local,) = rank.pipeline.local
            assert local.common is not None
            noise = (local.waiting(rank.pipeline.own).between(0, N) - local.common)[here]
            torch.testing.assert_close(noise, (rank.moved - mean)[here], rtol=0, atol=1e-6)
        for rank in ranks:
            rank.moved[here] = 0.0
            rank.step()


def coherence(ranks: list[Rank]) -> float:
    """The part of momentum that all have."""
    every = torch.stack([rank.momentum for rank in ranks])
    return float(len(ranks) * every.mean(0).square().sum() / every.square().sum())


def trained(density: float, **settings: Any) -> list[Rank]:
    ranks = [Rank(number, density, **settings) for number in range(WORLD)]
    for _ in range(40):
        for rank in ranks:
            rank.pipeline.begins_exchange()
        if ranks[0].pipeline.since == 0:
            exchange(ranks)
        for rank in ranks:
            rank.step()
    return ranks


@pytest.mark.parametrize(("density", "every"), [(1.0, 1), (0.3, 1), (0.1, 1), (0.6, 2)])
def test_ranks_momentum_is_more_alike_and_without_it_is_not(
    density: float, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = coherence(trained(density, every=every))
    monkeypatch.setattr(shared_momentum, "PART", 0.0)
    assert shared > 1.1 * coherence(trained(density, every=every))


def test_pieces_of_parameters_are_looked_at_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each once, for whoever asks for its parameter."""
    monkeypatch.setattr(steps, "CHUNK", 128)
    ranks = [Rank(number, 0.3) for number in range(WORLD)]
    for _ in range(7):
        exchange(ranks)
        for rank in ranks[1:]:
            rank.step()
        update = ranks[0].pipeline.outcomes[0].update
        found = [each for names in ({"q"}, {"p"}) for each in ranks[0].pipeline.noise(names)]
        assert sum(noise.numel() for _, noise in found) == update.count
        for pieces, noise in found:
            assert noise.numel() == sum(here.stop - here.start for _, here in pieces) <= 128
        assert not list(ranks[0].pipeline.noise({"p", "q"}))


def test_pieces_that_adjoin_are_looked_at_together_and_what_only_this_rank_moved_is_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks, others = ([Rank(number, 1.0) for number in range(WORLD)] for _ in range(2))
    for each in (ranks, others):
        for _ in range(6):
            for rank in each:
                rank.step()
            exchange(each)
    found = list(ranks[0].pipeline.noise({"p", "q"}))
    ((pieces, noise),) = found
    assert dict(pieces) == {"p": slice(0, 1000), "q": slice(0, 2000)}
    monkeypatch.setattr(steps, "CHUNK", 300)
    alone = list(others[0].pipeline.noise({"p", "q"}))
    assert [len(each) for each, _ in alone].count(1) == len(alone) > 9
    assert torch.equal(torch.cat([part for _, part in alone]), noise)


def test_a_flush_leaves_no_noise() -> None:
    ranks = trained(0.3)
    exchange(ranks, everything=True)
    for rank in ranks:
        assert not any(vector.any() for vector in rank.pipeline.common())
        assert not list(rank.pipeline.noise({"p", "q"}))


def test_stretches_that_nobody_steps_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_steps, "_MOST_NOISY", 4)
    ranks = [Rank(number, 0.1) for number in range(WORLD)]
    for _ in range(9):
        exchange(ranks)
    found = list(ranks[0].pipeline.noise({"p", "q"}))
    assert sum(noise.numel() for _, noise in found) <= 4 * 0.2 * N
