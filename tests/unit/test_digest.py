"""The fingerprint of a replica: every single change shows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gradsieve.ranks_alike import digest

BITS = {
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
    torch.int64: torch.int64,
}
every_dtype = pytest.mark.parametrize("dtype", BITS)


def values(size: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return (torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 100).to(dtype)


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return torch.equal(digest(left), digest(right))


@every_dtype
@given(size=st.integers(1, 9000), data=st.data())
def test_every_single_bit_shows(dtype: torch.dtype, size: int, data: st.DataObject) -> None:
    x = values(size, dtype)
    bits = x.view(BITS[dtype]).clone()
    place = data.draw(st.integers(0, size - 1))
    bit = data.draw(st.integers(0, 8 * dtype.itemsize - 1))
    flip = 1 << bit if bit < 8 * dtype.itemsize - 1 else -(1 << bit)
    bits[place] ^= flip
    assert not same([x], [bits.view(dtype)])


def test_exchanged_values_show_at_the_period_of_a_weight() -> None:
    x = torch.arange(9000.0)
    y = x.clone()
    y[[0, 8191]] = x[[8191, 0]]
    assert not same([x], [y])


def test_zeros_of_both_signs_lengths_and_types_show() -> None:
    zero = torch.zeros(8)
    assert not same([zero], [-zero])
    assert not same([zero], [torch.zeros(9)])
    assert not same([zero], [])


def test_the_order_of_tensors_and_a_value_moved_between_them_show() -> None:
    x, y = values(50, torch.float32, 1), values(50, torch.float32, 2)
    assert not same([x, y], [y, x])
    moved_x, moved_y = x.clone(), y.clone()
    moved_x[7], moved_y[7] = y[7], x[7]
    assert not same([x, y], [moved_x, moved_y])


def test_memory_formats_do_not_show() -> None:
    x = torch.randn(2, 8, 4, 4)
    assert same([x], [x.to(memory_format=torch.channels_last)])
    assert same([x[:, ::2]], [x[:, ::2].contiguous()])
