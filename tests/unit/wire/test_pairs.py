"""What bytes: index types, value bits, and the door for a peer's message."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradsieve.errors import Malformed
from gradsieve.testing.laws import same_bits
from gradsieve.wire import check
from gradsieve.wire.pairs import from_bits, index_dtype, to_bits

LARGEST_INT32 = 2**31 - 1


@pytest.mark.parametrize(
    ("n", "values", "expected"),
    [
        (0, torch.float32, torch.int32),
        (LARGEST_INT32, torch.float32, torch.int32),
        (LARGEST_INT32 + 1, torch.float32, torch.int64),
        (2**40, torch.float32, torch.int64),
        (10, torch.float64, torch.int64),
    ],
)
def test_indices_take_four_bytes_below_two_to_the_31_and_eight_beyond(
    n: int, values: torch.dtype, expected: torch.dtype
) -> None:
    assert index_dtype(n, values) == expected
    assert torch.tensor([n], dtype=expected).item() == n, "the filler index n must fit as well"


@given(
    numbers=st.lists(st.floats(width=32), max_size=20),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    wide=st.booleans(),
)
def test_values_come_back_from_their_bits(numbers: list[float], dtype: torch.dtype, wide: bool) -> None:
    values = torch.tensor(numbers, dtype=dtype)
    bits = to_bits(values)
    assert not bits.is_floating_point()
    assert same_bits(from_bits(bits.long() if wide else bits, dtype), values)


@pytest.mark.parametrize("bad", [-1, 11, -(2**63), 2**63 - 1])
def test_impossible_counts_are_refused_and_the_rank_named(bad: int) -> None:
    with pytest.raises(Malformed, match=rf"rank 2 announced {bad} elements"):
        check.counts_within(torch.tensor([0, 10, bad, 3]), 10, "elements")


@pytest.mark.parametrize(
    "indices", [[-1], [10], [0, 0], [3, 2], [-5, 3], [1, 2, 2**62], [0, -1, 5], [0, 11, 5]]
)
def test_any_other_indices_are_refused(indices: list[int]) -> None:
    with pytest.raises(Malformed, match=r"not sorted, unique and inside 0\.\.9"):
        check.strictly_increasing(torch.tensor(indices), 10, "indices")


@pytest.mark.parametrize("tail", [-1e-45, -1e38, float("nan"), float("inf"), -float("inf")])
def test_impossible_tails_are_refused_and_the_rank_named(tail: float) -> None:
    with pytest.raises(Malformed, match=r"rank 1 .* in step 3"):
        check.statistics_within(np.array([1.0, tail], np.float32), "in step 3")


@given(row=st.lists(st.integers(-3, 12), min_size=1, max_size=5))
def test_a_row_passes_exactly_if_python_says_so(row: list[int]) -> None:
    """The law of the door, spelt out without tensors."""
    real = [index for index in row if index != 10]
    lawful = row[: len(real)] == real == sorted(set(real)) and all(0 <= index < 10 for index in real)
    if lawful:
        check.rows_increasing(torch.tensor([row]), 10, "indices")
    else:
        with pytest.raises(Malformed):
            check.rows_increasing(torch.tensor([row]), 10, "indices")
