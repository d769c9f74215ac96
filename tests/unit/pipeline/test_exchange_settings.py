"""Settings of an exchange as objects and as text, what they refuse, and their small parts one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradsieve.coherence import Coherence, probe, squares
from gradsieve.errors import ConfigError
from gradsieve.pipeline.exchange_settings import (
    Gradients,
    Steps,
    choose_exchange,
    choose_scheme,
)
from gradsieve.schemes import make
from gradsieve_tools.specs import parse_exchange

# -- by name --------------------------------------------------------------------------------------------


def test_what_is_exchanged_where_the_user_does_not_say() -> None:
    own = Steps(small=5)
    assert choose_exchange(own, make("topk")) is own
    assert choose_exchange(None, make("topk")) == Steps()
    assert choose_exchange(None, make("dense")) == Gradients()
    assert choose_exchange(None, make("exdyna-paper")) == Gradients(small=0)
    with pytest.raises(ConfigError, match=r"exchange='paper': give gradsieve\.Steps"):
        choose_scheme("topk", None, None, "paper")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("none", "no exchange settings 'none'"),
        ("steps:exchange=gradients", "no setting 'exchange=gradients'"),
        ("steps:every=much", "every must be of type int, not 'much'"),
        ("gradients:overlap=1", "gradients has no setting 'overlap=1'"),
        ("gradients:small=-1", "a count: 0 or more"),
    ],
)
def test_what_makes_no_sense_is_refused_in_words(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_exchange(text, make("topk"))


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


@pytest.mark.parametrize(("step", "looks"), [(0, 25), (500, 25), (2000, 100), (10_000, 500), (10**6, 500)])
def test_averages_are_over_the_last_tenth_of_a_training(step: int, looks: int) -> None:
    """One look's part in an average to which all looks were alike before it."""
    before = Coherence(numerator=0.0, denominator=1.0 * looks, samples=1.0)
    after = before.after(np.array([[1.0, 1.0]]), 1, step)
    assert after.numerator / after.denominator == pytest.approx(1.0 / looks)
