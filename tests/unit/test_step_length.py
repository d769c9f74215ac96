"""How long a step is; and a rank's own noise in momentum: what it is, what is taken out, and from whom."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, NAdam, RMSprop

from gradsieve import Steps, step_length
from gradsieve.schemes import make
from gradsieve.step_length import FEWEST, PART, StepLength, take_out
from gradsieve.testing import StepPipeline, lockstep
from unit.test_optimizers import MUON, SignDescent

WORLD, N = 8, 3000


def parameter() -> nn.Parameter:
    return nn.Parameter(torch.linspace(1.0, 2.0, 12).view(3, 4))


def made(p: nn.Parameter) -> StepLength:
    return StepLength({"p": p.data.view(-1)}, {"p": p})


# -- a step -----------------------------------------------------------------------------------------------


def moved(kind: Any, rho: float, gradient: Tensor, **settings: Any) -> Tensor:
    p = parameter()
    optimizer, length = kind([p], **settings), made(p)
    before = p.detach().clone()
    p.grad = gradient.clone()
    length.before(optimizer, {"p"}, (), rho, 1.0)
    assert {name: optimizer.param_groups[0][name] for name in settings} == settings, "the user's settings"
    optimizer.step()
    length.after()
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
    optimizer, length = AdamW([p], lr=0.1, weight_decay=0.5, fused=True), made(p)
    optimizer.found_inf, optimizer.grad_scale = torch.tensor(1.0), torch.tensor(2.0)
    p.grad = torch.ones(3, 4)
    length.before(optimizer, {"p"}, (), 0.25, 1.0)
    optimizer.step()
    length.after()
    assert torch.equal(p, before)


def test_a_step_that_broke_off_is_forgotten() -> None:
    p = parameter()
    optimizer, length = AdamW([p], lr=0.01, weight_decay=0.0), made(p)
    p.grad = torch.ones(3, 4)
    length.before(optimizer, {"p"}, (), 0.25, 1.0)
    with torch.no_grad():
        p += 100.0  # the step raised after it had written
    before = p.detach().clone()
    length.before(optimizer, {"p"}, (), 0.25, 1.0)
    optimizer.step()
    length.after()
    torch.testing.assert_close(p.detach() - before, torch.full((3, 4), -0.02), rtol=1e-2, atol=1e-4)


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
    assert torch.equal(first, before)


def test_an_element_whose_second_moment_overflowed_is_left_out() -> None:
    first, second, _ = drawn(0)
    noise = first / second.sqrt()
    second[7] = float("inf")
    before = first.clone()
    take_out([(first, second, noise)], 1e-8)
    assert first[7] == before[7]
    assert not torch.equal(first, before)
    assert bool(first.isfinite().all())


# -- from whom ------------------------------------------------------------------------------------------


def test_a_transposed_parameter_has_its_moments_in_its_own_order() -> None:
    values = torch.arange(512.0).view(16, 32).t().clone(memory_format=torch.preserve_format)
    parameter = nn.Parameter(values)
    assert parameter.stride() == (1, 32)
    optimizer = AdamW([parameter], lr=1e-3)
    parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    state = optimizer.state[parameter]
    in_memory = (state["exp_avg"].t().flatten() / (state["exp_avg_sq"].t().flatten().sqrt() + 1e-8)).clone()
    StepLength({}, {"p": parameter}).take_out(
        optimizer, [([("p", slice(128, 256))], in_memory[128:256].clone())]
    )
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
    StepLength({}, {"p": parameter}).take_out(optimizer, [([("p", slice(0, count))], torch.ones(count))])
    assert torch.equal(first, before) is (count < FEWEST)


class Keeping(SGD):
    """Has tensors under Adam's names, and does not step along them."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = {"exp_avg": torch.ones_like(p), "exp_avg_sq": torch.ones_like(p)}
        return super().step(closure)


@pytest.mark.parametrize("kind", [Keeping, AdamW])
def test_moments_along_which_nobody_steps_are_left_alone(kind: Any) -> None:
    p = nn.Parameter(torch.ones(100))
    optimizer = kind([p], lr=1e-3)
    p.grad = torch.logspace(-2, 2, 100)
    optimizer.step()
    first = optimizer.state[p]["exp_avg"]
    before = first.clone()
    made(p).take_out(optimizer, [([("p", slice(0, 100))], torch.ones(100))])
    assert torch.equal(first, before) is (kind is Keeping)


# -- what is noise --------------------------------------------------------------------------------------


class Rank:
    """One of a few with AdamW, whose gradients are the same for all but for noise that is four times as
    large."""

    def __init__(self, rank: int, density: float, **settings: Any) -> None:
        start = torch.linspace(-1, 1, N)
        self.parameters = {"p": nn.Parameter(start[:1000].clone()), "q": nn.Parameter(start[1000:].clone())}
        self.optimizer = AdamW(self.parameters.values(), lr=1e-3)
        scheme = make("stripes", density=density)
        stepped = [self.optimizer]
        self.pipeline = StepPipeline(self.parameters, stepped, scheme, Steps(**settings), rank, WORLD)
        self.alike, self.own = torch.Generator().manual_seed(99), torch.Generator().manual_seed(rank)
        self.moved = torch.zeros(N)

    @property
    def model(self) -> Tensor:
        return torch.cat(
            [self.pipeline.models.own[slot.name] for slot in self.pipeline.units[0].slots]
        ).clone()

    @property
    def momentum(self) -> Tensor:
        states = [self.optimizer.state[each] for each in self.parameters.values()]
        return torch.cat([state["exp_avg"] / (state["exp_avg_sq"].sqrt() + 1e-8) for state in states])

    def step(self) -> None:
        for parameter in self.parameters.values():
            size = parameter.shape
            parameter.grad = torch.randn(size, generator=self.alike)
            parameter.grad += 4 * torch.randn(size, generator=self.own)
        self.pipeline.before_update(self.optimizer, self.parameters.keys())
        before = self.model
        self.optimizer.step()
        self.pipeline.after_update()
        self.moved += before - self.model


def exchange(ranks: list[Rank], everything: bool = False) -> Tensor:
    """What all ranks moved in the mean, of all that was exchanged."""
    shared = ranks[0].pipeline.models.shared[0]
    before = shared.clone()
    begun = [rank.pipeline.begin("flush()" if everything else "training") for rank in ranks]
    lockstep.run([rank.pipeline.program(own, 0) for rank, own in zip(ranks, begun, strict=True)])
    for rank, own in zip(ranks, begun, strict=True):
        rank.pipeline.finish(own)
    return before - shared


@pytest.mark.parametrize("density", [0.3, 0.1])
def test_noise_is_what_a_rank_moved_and_the_others_did_not(density: float) -> None:
    ranks = [Rank(number, density) for number in range(WORLD)]
    for _ in range(25):
        mean = exchange(ranks)
        update = ranks[0].pipeline.outcomes[0].update
        here = slice(update.start, update.stop)
        for rank in ranks:
            noise = (next(rank.pipeline.residuals()) - rank.pipeline.models.mean[0])[here]
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
    monkeypatch.setattr(step_length, "PART", 0.0)
    assert shared > 1.1 * coherence(trained(density, every=every))


def test_a_flush_leaves_no_noise() -> None:
    ranks = trained(0.3)
    exchange(ranks, everything=True)
    for rank in ranks:
        assert not any(vector.any() for vector in rank.pipeline.models.mean)
        assert not list(rank.pipeline.models.noise({"p", "q"}))
