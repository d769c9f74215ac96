"""Settings of an exchange as objects and as text, what they refuse, and their small parts one by one."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradsieve.errors import ConfigError
from gradsieve.feedback.clip import clip
from gradsieve.feedback.coherence import Coherence, probe, squares
from gradsieve.feedback.velocity import Momentum, MovedMomentum
from gradsieve.pipeline.exchange_settings import (
    Exchange,
    Gradients,
    Steps,
    choose_exchange,
    choose_scheme,
    parse,
    published,
)
from gradsieve.schemes import make

# -- by name --------------------------------------------------------------------------------------------


def test_what_is_exchanged_where_the_user_does_not_say() -> None:
    own = Steps(preview=0.5)
    assert choose_exchange(own, make("topk")) is own
    assert choose_exchange(None, make("topk")) == Steps()
    assert choose_exchange(None, make("dense")) == Gradients()
    assert published(make("exdyna")) == Gradients(small=0)
    assert published(make("dgc")) == Gradients(momentum="masked", clip=1.0, small=0)
    with pytest.raises(ConfigError, match=r"exchange='paper': give gradsieve\.Steps"):
        choose_scheme("topk", None, None, "paper")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("default", Steps()),
        ("paper", Gradients(small=0)),
        ("steps", Steps()),
        ("steps:preview=1", Steps(preview=1.0)),
        ("steps:overlap=0", Steps(overlap=0)),
        ("steps:warm_up=5+refresh=7+small=0", Steps(warm_up=5, refresh=7, small=0)),
        ("gradients", Gradients()),
        (
            "gradients:momentum=masked+by_rate=true+clip=0.5",
            Gradients(momentum="masked", by_rate=True, clip=0.5),
        ),
        ("gradients:memory=estimate", Gradients(memory="estimate")),
    ],
)
def test_exchange_settings_as_text(text: str, wanted: Exchange) -> None:
    assert parse(text, make("topk")) == wanted


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("none", "no exchange settings 'none'"),
        ("", "no exchange settings ''"),
        ("paper:clip=1", "no exchange settings 'paper:clip=1'"),
        ("steps:", "steps has no setting ''"),
        ("steps:exchange=gradients", "no setting 'exchange=gradients'"),
        ("steps:preview=much", "preview must be of type float, not 'much'"),
        ("steps:preview=2", "preview is a part"),
        ("steps:clip=1", "steps has no setting 'clip=1'"),
        ("gradients:momentum=none", "momentum must be optimizer or local or masked"),
        ("gradients:by_rate=1", "by_rate must be true or false"),
        ("gradients:preview=1", "gradients has no setting 'preview=1'"),
        ("gradients:overlap=0", "gradients has no setting 'overlap=0'"),
        ("gradients:clip=0", "clip is a norm above 0"),
        ("gradients:clip=nan", "clip is a norm above 0"),
        ("gradients:warm_up=-1", "counts: 0 or more"),
    ],
)
def test_what_makes_no_sense_is_refused_in_words(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse(text, make("topk"))


def test_a_budget_that_follows_what_hides_needs_something_to_hide_behind() -> None:
    now = Steps(overlap=0)
    with pytest.raises(ConfigError, match="with overlap=0 nothing hides"):
        choose_scheme(None, None, None, now)
    assert choose_scheme(None, None, 0.5, now) == make("stripes")
    assert choose_scheme(None, 0.01, None, now) == make("exdyna", 0.01)


def test_exchange_settings_describe_what_is_set() -> None:
    assert Steps().describe() == "exchange=steps"
    assert Steps(overlap=0).describe() == "exchange=steps, overlap=0"
    assert Gradients(clip=0.5).describe() == "exchange=gradients, clip=0.5"


@pytest.mark.parametrize(
    ("warm_up", "refresh", "wanted"),
    [
        (0, 0, [0.01, 0.01, 0.01, 0.01, 0.01]),
        (2, 0, [1.0, 0.1, 0.01, 0.01, 0.01]),
        (0, 2, [0.01, 1.0, 0.01, 1.0, 0.01]),
        (0, 1, [1.0, 1.0, 1.0, 1.0, 1.0]),
        (4, 3, [1.0, 0.01**0.25, 1.0, 0.01**0.75, 0.01]),
    ],
)
def test_the_density_of_a_step(warm_up: int, refresh: int, wanted: list[float]) -> None:
    treatment = Steps(warm_up=warm_up, refresh=refresh)
    assert [treatment.density_at(step, 0.01) for step in range(5)] == pytest.approx(wanted, rel=1e-12)


# -- coherence ------------------------------------------------------------------------------------------


class Whole:
    """A tensor, read as what waits is."""

    def __init__(self, vector: torch.Tensor) -> None:
        self.vector, self.numel = vector, vector.numel
        self.device, self.dtype = vector.device, vector.dtype

    def at(self, host: Any, indices: torch.Tensor) -> torch.Tensor:
        return self.vector[indices]


def preview(waiting: list[torch.Tensor], steps: int = 1) -> float:
    coherence = Coherence()
    for step in range(steps):
        total = torch.stack([probe(Whole(own), step) for own in waiting]).sum(0)
        coherence = coherence.after(squares(total)[None].numpy(), len(waiting), step)
    return coherence.share(len(waiting))


@given(world=st.integers(1, 16), n=st.integers(1, 500), seed=st.integers(0, 99))
def test_preview_lies_between_one_rank_and_all(world: int, n: int, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    noise = [torch.randn(n, generator=random) for _ in range(world)]
    assert 1 / world <= preview(noise) <= 1.0
    assert preview([noise[0]] * world) == pytest.approx(1.0, abs=1e-5)
    opposed = [noise[0], -noise[0]] * world
    assert preview(opposed) == 1 / (2 * world)


@pytest.mark.parametrize("world", [2, 4, 9])
def test_preview_of_noise_is_one_rank_of_all(world: int) -> None:
    random = torch.Generator().manual_seed(world)
    noise = [torch.randn(20_001, generator=random) for _ in range(world)]
    assert preview(noise, steps=30) == pytest.approx(1 / world, rel=0.1)


def test_preview_where_nothing_waits_is_all_and_large_numbers_do_not_upset_it() -> None:
    assert Coherence().share(4) == 1.0
    assert preview([torch.zeros(7)] * 3) == 1.0
    assert preview([torch.empty(0)] * 3) == 1.0
    assert preview([torch.full((7,), 4e17)] * 4) == pytest.approx(1.0)


# -- clip -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("step", "looks"), [(0, 25), (500, 25), (2000, 100), (10_000, 500), (10**6, 500)])
def test_averages_are_over_the_last_tenth_of_a_training(step: int, looks: int) -> None:
    """One look's part in an average to which all looks were alike before it."""
    before = Coherence(alike=0.0, all=1.0 * looks, seen=1.0)
    after = before.after(np.array([[1.0, 1.0]]), 1, step)
    assert after.alike / after.all == pytest.approx(1.0 / looks)


@given(most=st.floats(1e-3, 1e3), size=st.floats(1e-3, 1e3), seed=st.integers(0, 99))
def test_clip_never_lengthens_and_caps_the_norm(most: float, size: float, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    before = {name: size * torch.randn(n, generator=random) for name, n in (("a", 5), ("b", 9))}
    after = {name: part.clone() for name, part in before.items()}
    clip(after, most)
    long, short = (math.hypot(*(float(part.norm()) for part in own.values())) for own in (before, after))
    assert short == pytest.approx(min(long, most), rel=1e-5)
    for name, part in before.items():
        assert torch.allclose(after[name] * long, part * short, rtol=1e-4), "another direction"


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_clip_leaves_what_is_not_finite_for_the_vote(bad: float) -> None:
    gradients = {"a": torch.tensor([1.0, bad])}
    clip(gradients, 0.1)
    assert not gradients["a"].isfinite().all()


# -- momentum -------------------------------------------------------------------------------------------


def test_momentum_is_taken_group_by_group_and_given_back() -> None:
    first, second, other = (torch.nn.Parameter(torch.ones(2)) for _ in range(3))
    groups = [
        {"params": [first], "momentum": 0.9, "nesterov": True, "lr": 0.5},
        {"params": [second], "momentum": 0.5, "weight_decay": 0.1},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    before = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    moved = MovedMomentum(optimizer)
    moved.take()
    assert moved.of("first", first) == Momentum(0.9, 0.0, nesterov=True)
    assert moved.of("second", second) == Momentum(0.5, 0.1, nesterov=False)
    first.grad, second.grad = torch.ones(2), torch.ones(2)
    for _ in range(2):
        optimizer.step()
    assert torch.equal(first.detach(), torch.zeros(2)), "momentum or decay was applied twice"
    assert torch.allclose(second.detach(), torch.full((2,), 0.8))
    with pytest.raises(ConfigError, match="does not have parameter 'other'"):
        moved.of("other", other)
    moved.give_back()
    assert [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups] == before


def test_momentum_is_moved_out_of_plain_sgd_only() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(ConfigError, match=r"not out of AdamW: use gradsieve\.Steps"):
        MovedMomentum(torch.optim.AdamW([parameter]))
    for odd in ({"dampening": 0.1}, {"maximize": True}):
        optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9, **odd)
        with pytest.raises(ConfigError, match="dampening or maximize"):
            MovedMomentum(optimizer)
        assert optimizer.param_groups[0]["momentum"] == 0.9, "a refused optimizer stays as it was"
