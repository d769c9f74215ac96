"""Signs of trouble, and the one warning."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor

from gradsieve.observe.diagnostics import Advisor, advice, signs
from gradsieve.schemes import SCHEMES, make
from gradsieve.types import Outcome, Sparse

FINE = {"staleness": 50.0, "waiting": 5.0, "fidelity": 0.5}


def outcome(values: Tensor, indices: Tensor | None, n: int) -> Outcome[None]:
    spent = Sparse(indices, values, n)
    return Outcome(spent, spent, None)


def test_a_queue_that_is_served_evenly_is_as_old_as_littles_law_says() -> None:
    """One of n elements leaves a step and all grow by 1: what waits was on average n / 2 steps ago."""
    n, kept = 64, torch.zeros(64)
    for step in range(10 * n):
        kept += 1
        place = torch.tensor([step % n])
        gone = outcome(kept[place].clone(), place, n)
        kept[place] = 0
    assert signs([kept], [gone])["staleness"] == pytest.approx((n - 1) / 2)


@pytest.mark.parametrize("n", [1000, 1 << 18])
def test_the_best_choice_has_fidelity_one_and_a_blind_one_little(n: int) -> None:
    source = torch.Generator().manual_seed(0)
    had = torch.randn(n, generator=source) ** 3
    k = n // 20
    for indices, low, high in (
        (had.abs().topk(k).indices.sort().values, 0.9, 1.0),
        (torch.arange(k) * 20, 0.01, 0.3),
    ):
        kept = had.clone()
        kept[indices] = 0
        assert low <= signs([kept], [outcome(had[indices], indices, n)])["fidelity"] <= high


def test_nothing_sent_says_nothing() -> None:
    empty = outcome(torch.empty(0), torch.empty(0, dtype=torch.long), 10)
    assert signs([torch.ones(10)], [empty]) == {"staleness": 0.0, "waiting": 0.0, "fidelity": 1.0}


def test_what_was_sent_in_full_leaves_nothing() -> None:
    assert signs([torch.zeros(10)], [outcome(torch.ones(10), None, 10)])["waiting"] == 0.0


@pytest.mark.parametrize(
    ("sign", "value", "adaptive", "said"),
    [
        ("staleness", 2000.0, False, "raise density from 0.001 to 0.004"),
        ("waiting", 60.0, False, "raise density from 0.001 to 0.004"),
        ("waiting", 20.0, True, "raise density from 0.001"),
        ("fidelity", 0.01, False, "scheme='exdyna'"),
    ],
)
def test_each_sign_names_its_setting(sign: str, value: float, adaptive: bool, said: str) -> None:
    assert advice(FINE, 0.001, adaptive) is None
    text = advice({**FINE, sign: value}, 0.001, adaptive)
    assert text is not None
    assert said in text


@pytest.mark.parametrize("name", [name for name, kind in SCHEMES.items() if not kind.round_robin])
def test_the_scheme_in_use_is_never_advised(name: str, caplog: pytest.LogCaptureFixture) -> None:
    advisor = Advisor(make(name, 1.0 if SCHEMES[name].lossless else 0.001), adaptive=False, rank=0)
    with caplog.at_level(logging.WARNING, "gradsieve"):
        advisor.look({**FINE, "fidelity": 0.01}, 100)
    (said,) = caplog.messages
    assert f"'{name}'" not in said
    assert "choose scheme" in said or "raise density" in said


def test_where_elements_take_turns_no_density_and_no_scheme_is_advised(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nothing is chosen there, so that a choice cannot be blind; and a budget is not raised by a density."""
    with caplog.at_level(logging.WARNING, "gradsieve"):
        Advisor(make("stripes"), adaptive=True, rank=0).look({**FINE, "fidelity": 0.01, "waiting": 60.0}, 100)
    assert not caplog.messages


def test_sgd_bears_more_than_an_adaptive_optimizer() -> None:
    heavy = {**FINE, "waiting": 20.0}
    assert advice(heavy, 0.001, adaptive=False) is None
    assert advice(heavy, 0.001, adaptive=True) is not None


def test_it_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    advisor = Advisor(make("exdyna", 0.001), adaptive=False, rank=3)
    with caplog.at_level(logging.WARNING, "gradsieve"):
        advisor.look(FINE, 100)
        assert caplog.messages == []
        for step in (200, 300):
            advisor.look({**FINE, "staleness": 5000.0}, step)
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("rank 3, step 200: ")
