"""Values in few bytes: they come back as near as promised, or as visibly broken as they were."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gradsieve.testing.laws import same_bits
from gradsieve.wire.values import BLOCK, VALUE_CODECS, ValueCodec

EXACT, BF16, INT8, *LOW = VALUE_CODECS.values()

value_codecs = pytest.mark.parametrize("codec", VALUE_CODECS.values(), ids=VALUE_CODECS.keys())
float_types = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)

moderate = st.floats(-(2.0**100), 2.0**100, width=32)
anything = st.floats(width=32)
any_length = st.sampled_from([0, 1, 7, 127, 128, 129, 256, 300])
LONGEST = 2 * BLOCK
"""Of any codec's blocks."""


def some_values(data: st.DataObject, elements: st.SearchStrategy[float], dtype: torch.dtype) -> Tensor:
    few = data.draw(st.lists(elements, min_size=1, max_size=9))
    return torch.tensor(few * 300, dtype=dtype)[: data.draw(any_length)]


def believed(codec: ValueCodec, values: Tensor) -> Tensor:
    data = codec.encode(values)
    assert data.dtype == torch.uint8
    assert data.shape == (codec.predict_size(values.numel(), values.dtype),)
    back = codec.decode(data, values.numel(), values.dtype)
    assert (back.dtype, back.shape) == (values.dtype, values.shape)
    return back


@float_types
@given(data=st.data())
def test_exact_values_keep_every_bit(dtype: torch.dtype, data: st.DataObject) -> None:
    values = some_values(data, anything, dtype)
    assert same_bits(believed(EXACT, values), values)


@float_types
@given(data=st.data())
def test_bf16_is_within_two_to_the_minus_eight_and_rounds_once(
    dtype: torch.dtype, data: st.DataObject
) -> None:
    values = some_values(data, moderate, dtype)
    back = believed(BF16, values)
    denormal = 2.0**-133
    assert bool(((back - values).abs() <= 2.0**-8 * values.abs() + denormal).all())
    assert same_bits(believed(BF16, back), back)


@float_types
@given(data=st.data())
def test_int8_is_within_half_a_step_of_its_block(dtype: torch.dtype, data: st.DataObject) -> None:
    values = some_values(data, moderate, dtype)
    error = (believed(INT8, values) - values).abs()
    for part, wrong in zip(values.split(BLOCK), error.split(BLOCK), strict=True):
        step = 2 * float(part.abs().max()) / 127 if part.numel() else 0.0  # at most: a power of two
        assert bool((wrong.double() <= step * 0.5 + 2.0**-128).all())


def test_int8_rounds_to_even_and_each_block_has_its_own_scale() -> None:
    values = torch.zeros(2 * BLOCK + 3)
    values[:5] = torch.tensor([127.0, 0.5, 1.5, -2.5, 1.25])
    values[-3:] = torch.tensor([-127.0, 1.0, 3.0]) * 2.0**-20
    back = believed(INT8, values)
    assert back[:5].tolist() == [127.0, 0.0, 2.0, -2.0, 1.0]
    assert bool((back[5:-3] == 0).all())
    assert torch.equal(back[-3:], values[-3:])


@value_codecs
@float_types
@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_so(codec: ValueCodec, dtype: torch.dtype, odd: float) -> None:
    values = torch.linspace(-1, 1, 2 * LONGEST + 9, dtype=dtype)
    values[LONGEST + 3] = odd
    finite = believed(codec, values).isfinite()
    assert not bool(finite[LONGEST + 3])
    assert bool(finite[:LONGEST].all() & finite[2 * LONGEST :].all())
    if codec not in (EXACT, BF16):
        block = BLOCK if codec is INT8 else LONGEST
        spoilt = finite[LONGEST : LONGEST + block]
        assert not bool(spoilt.any()), "the whole block is spoilt, not a part of it zeroed"


@pytest.mark.parametrize("codec", [BF16, INT8, *LOW], ids=lambda codec: codec.name)
def test_what_float32_cannot_hold_is_seen_as_overflow(codec: ValueCodec) -> None:
    assert not bool(believed(codec, torch.tensor([1e300], dtype=torch.float64)).isfinite().any())


@value_codecs
@float_types
@given(data=st.data())
def test_any_bytes_decode_to_some_floats(codec: ValueCodec, dtype: torch.dtype, data: st.DataObject) -> None:
    """Wherever they lie in a message, and for all rows at once as for one."""
    count, world = data.draw(any_length), data.draw(st.integers(1, 3))
    before, size = data.draw(st.integers(0, 5)), codec.predict_size(count, dtype)
    seed = data.draw(st.integers(0, 2**32))
    shape, random = (world, before + size + 1), torch.Generator().manual_seed(seed)
    part = torch.randint(0, 256, shape, dtype=torch.uint8, generator=random)[:, before : before + size]
    back = codec.decode(part, count, dtype)
    assert (back.dtype, back.shape) == (dtype, (world, count))
    for row, alone in zip(part, back, strict=True):
        assert torch.equal(codec.decode(row, count, dtype).nan_to_num(), alone.nan_to_num())
    total = functools.reduce(torch.add, back)
    assert torch.equal(codec.decode_sum(part, count, dtype).nan_to_num(), total.nan_to_num())


@value_codecs
@float_types
def test_rows_are_added_up_in_their_order(codec: ValueCodec, dtype: torch.dtype) -> None:
    """A small one is lost beside two large ones that cancel only if it comes between them."""
    large, small = torch.tensor([2.0**60, 1.0], dtype=dtype)
    for rows, wanted in (((large, -large, small), 1.0), ((large, small, -large), 0.0)):
        data = codec.encode(torch.stack(rows)[:, None])
        part = codec.decode(codec.encode(small[None]), 1, dtype)
        assert codec.decode_sum(data, 1, dtype).tolist() == [wanted * float(part)]
        alone = data[:1].clone()
        assert same_bits(codec.decode_sum(alone, 1, dtype), codec.decode(alone[0], 1, dtype))
        codec.decode_sum(alone, 1, dtype).zero_()
        assert same_bits(alone, data[:1]), "the sum is the caller's own"


@value_codecs
@float_types
@pytest.mark.parametrize("count", [0, 1, 300])
def test_values_wait_for_no_device(codec: ValueCodec, dtype: torch.dtype, count: int) -> None:
    """Shapes are known without any data (test_codecs shows that nobody can look at such a tensor)."""
    data = codec.encode(torch.ones(count, dtype=dtype, device="meta"))
    assert data.shape == (codec.predict_size(count, dtype),)
    back = codec.decode(data.expand(3, -1), count, dtype)
    assert (back.device.type, back.shape) == ("meta", (3, count))
    assert codec.decode_sum(data.expand(3, -1), count, dtype).shape == (count,)
