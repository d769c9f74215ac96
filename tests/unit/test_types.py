"""Sparse vectors, k, and the densities that are refused."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradsieve.errors import ConfigError
from gradsieve.types import Sparse, check_density, target_count


@given(n=st.integers(1, 50), places=st.sets(st.integers(0, 49)), seed=st.integers(0, 100))
def test_dense_form_and_subtraction_agree_element_by_element(n: int, places: set[int], seed: int) -> None:
    indices = torch.tensor(sorted(place for place in places if place < n), dtype=torch.int64)
    values = torch.randn(indices.numel(), generator=torch.Generator().manual_seed(seed))
    sparse = Sparse(indices, values, n)
    by_hand = [0.0] * n
    for index, value in zip(indices.tolist(), values.tolist(), strict=True):
        by_hand[index] = value
    assert sparse.to_dense().tolist() == by_hand
    vector = torch.ones(n)
    sparse.subtract_from(vector)
    assert torch.equal(vector, torch.ones(n) - torch.tensor(by_hand))
    assert sparse.count == len(indices)


@pytest.mark.parametrize(
    ("density", "n", "k"),
    [
        (0.29, 100, 29),  # 0.29 * 100 is 28.999999999999996
        (0.57, 100, 57),
        (0.001, 25_000_000, 25_000),
        (0.001, 999, 1),
        (0.001, 1, 1),
        (0.5, 0, 0),
        (1.0, 7, 7),
        (1e-300, 10, 1),
        (0.999999, 10, 9),
        (0.001, 2**40, 1_099_511_627),
    ],
)
def test_k_is_the_floor_of_what_the_user_wrote(density: float, n: int, k: int) -> None:
    assert target_count(density, n) == k


@given(density=st.floats(0, 1, exclude_min=True), n=st.integers(0, 10**12))
def test_k_is_exact_and_within_the_vector(density: float, n: int) -> None:
    k = target_count(density, n)
    assert min(n, 1) <= k <= n
    wanted = Fraction(repr(density)) * n
    assert k == wanted.__floor__() or (wanted < 1 and k == min(n, 1))


@pytest.mark.parametrize("density", [0.0, -0.1, 1.0000001, 2.0, float("nan"), float("inf"), -float("inf")])
def test_densities_outside_zero_to_one_are_refused(density: float) -> None:
    with pytest.raises(ConfigError, match="density must be above 0 and at most 1"):
        check_density(density)
