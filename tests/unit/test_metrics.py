"""Size and age of the residual, as metrics and records have them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from gradsieve.metrics import Look, look
from gradsieve.types import Outcome, Sparse


def after(residual: Tensor, values: Tensor, indices: Tensor | None, scale: float = 1.0) -> Look:
    """A look at a pipeline of one unit that has just sent these values."""
    spent = Sparse(indices, values, residual.numel())
    pipeline: Any = SimpleNamespace(
        units=[SimpleNamespace(device=residual.device)],
        outcomes=[Outcome(spent, spent, None)],
        residual_scale=scale,
        residuals=lambda: iter([residual]),
    )
    return look(pipeline)


def test_a_queue_that_is_served_evenly_is_as_old_as_littles_law_says() -> None:
    """One of n elements leaves a step and all grow by 1: what is left came on average n / 2 steps ago."""
    n, residual = 64, torch.zeros(64)
    for step in range(10 * n):
        residual += 1
        place = torch.tensor([step % n])
        sent = residual[place].clone()
        residual[place] = 0
    assert after(residual, sent, place).age == pytest.approx((n - 1) / 2)


def test_figures_are_those_of_the_vectors_also_over_several_pieces() -> None:
    source = torch.Generator().manual_seed(0)
    before = torch.randn(300_000, generator=source)
    indices = torch.arange(0, 300_000, 7)
    residual = before.clone()
    residual[indices] *= 0.25  # values are sent in few bits: a part of them stays
    sent = 0.75 * before[indices]
    found = after(residual, sent, indices, scale=4.0)
    assert found.norm == pytest.approx(float(residual.norm()) / 4, rel=1e-5)
    assert found.share == pytest.approx(float(residual.norm() / sent.norm()), rel=1e-5)
    assert found.age == pytest.approx(float(residual.norm(1) / sent.norm(1)), rel=1e-5)
    assert found.contraction == pytest.approx(float(residual.norm() ** 2 / before.norm() ** 2), rel=1e-5)


def test_what_was_sent_in_full_leaves_nothing() -> None:
    assert after(torch.zeros(10), torch.ones(10), None) == Look(0.0, 0.0, 0.0, 0.0)


def test_nothing_sent_has_no_age() -> None:
    empty = torch.empty(0, dtype=torch.int64)
    assert after(torch.ones(10), torch.empty(0), empty) == Look(pytest.approx(10**0.5), None, None, 1.0)
