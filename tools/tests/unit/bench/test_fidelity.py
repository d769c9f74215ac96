"""Energy captured, what is left behind, imbalance: worked by hand, and the bound of 1."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradsieve.types import Sparse
from gradsieve_tools.bench.common.fidelity import captured, differs_from_top_k

TOTAL = torch.tensor([3.0, -4.0, 1.0, 0.0], dtype=torch.float64)


def sparse(**values: float) -> Sparse:
    """sparse(_1=-4.0): -4 at index 1."""
    indices = torch.tensor([int(name[1:]) for name in values], dtype=torch.long)
    return Sparse(indices, torch.tensor(list(values.values())), TOTAL.numel())


@pytest.mark.parametrize(
    ("update", "share"),
    [
        (sparse(_1=-4.0), 1.0),  # the largest element, all of it
        (sparse(_0=3.0), 9 / 16),  # another one: 9 of the 16 that one element can have
        (sparse(_1=-4.0, _2=1.0), 17 / 25),
        (sparse(_1=-2.0), 12 / 16),  # half of it, as where only some ranks spend: 26 - (9 + 4 + 1)
        (sparse(_3=2.0), -4 / 16),  # something where there was nothing
        (sparse(_1=4.0), -48 / 16),  # the wrong way: 26 - (9 + 64 + 1)
        (sparse(), 0.0),
        (Sparse.full(TOTAL.float()), 1.0),
    ],
)
def test_captured_by_hand(update: Sparse, share: float) -> None:
    assert captured(TOTAL, update) == share


numbers = st.floats(-100, 100, width=16)


@given(st.lists(st.tuples(numbers, numbers, st.booleans()), min_size=1, max_size=20))
def test_no_update_captures_more_than_all(elements: list[tuple[float, float, bool]]) -> None:
    total = torch.tensor([total for total, _, _ in elements], dtype=torch.float64)
    picked = torch.tensor([index for index, (_, _, sent) in enumerate(elements) if sent], dtype=torch.long)
    values = torch.tensor([value for _, value, sent in elements if sent], dtype=torch.float64)
    assert captured(total, Sparse(picked, values, len(elements))) <= 1 + 1e-12


def test_xi_is_0_for_the_top_k_itself_and_else_what_differs_over_what_is_new() -> None:
    total, new = torch.tensor([5.0, -4.0, 1.0, 0.0]), torch.tensor([0.0, 3.0, 4.0, 0.0])
    assert differs_from_top_k(total, torch.tensor([5.0, -4.0, 0.0, 0.0]), 2, new) == 0.0
    assert differs_from_top_k(total, torch.tensor([5.0, 0.0, 3.0, 0.0]), 2, new) == pytest.approx(1.0)
