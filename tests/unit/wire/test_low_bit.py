"""Values in four bits, two or one: where each bit lies, how near they come back, what is never hidden."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gradsieve.kernels.blocks import BLOCK
from gradsieve.testing.laws import same_bits
from gradsieve.wire.values import VALUE_CODECS, ValueCodec

INT4, INT2, SIGN = LOW = [VALUE_CODECS[name] for name in ("int4", "int2", "sign")]
BITS = {"int4": 4, "int2": 2, "sign": 1}
COUNTS = [0, 1, 7, 8, 9, 255, 256, 257, 511, 771]

low_codecs = pytest.mark.parametrize("codec", LOW, ids=BITS)
float_types = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
counts = st.sampled_from(COUNTS) | st.integers(0, 600)
moderate = st.floats(-(2.0**100), 2.0**100, width=32)
anything = st.floats(width=32)


@st.composite
def some_values(draw: st.DrawFn, dtype: torch.dtype, elements: st.SearchStrategy[float] = moderate) -> Tensor:
    """Few values over and over, or many different ones, of any magnitude."""
    count, few = draw(counts), draw(st.lists(elements, min_size=1, max_size=9))
    repeated = torch.tensor(few, dtype=dtype).repeat(count)[:count]
    if draw(st.booleans()):
        return repeated
    random = torch.randn(count, generator=torch.Generator().manual_seed(draw(st.integers(0, 999))))
    return random.to(dtype) * repeated


def without_zeros(values: Tensor) -> Tensor:
    return torch.where(values == 0, 1.0, values)


def believed(codec: ValueCodec, values: Tensor) -> Tensor:
    return codec.decode(codec.encode(values), values.shape[-1], values.dtype)


def scales(codec: ValueCodec, values: Tensor) -> Tensor:
    """For every value that of its block, as it is sent."""
    data = codec.encode(values)[: 2 * -(-values.numel() // BLOCK)]
    return data.clone().view(torch.bfloat16).double().repeat_interleave(BLOCK)[: values.numel()]


def golden(row: str, codec: ValueCodec, values: list[float], decoded: list[float]) -> None:
    for dtype in (torch.float32, torch.float64):
        data = codec.encode(torch.tensor(values, dtype=dtype))
        assert bytes(data.tolist()).hex(" ") == row
        assert codec.decode(data, len(values), dtype).tolist() == decoded


def test_every_bit_of_sign_has_its_place() -> None:
    """Mean 2: 0x4000. Positive: 0, 2, 3, 4, 8."""
    values = [1.0, -1.0, 1.0, 1.0, 6.0, -4.0, -2.0, -1.0, 1.0]
    golden("00 40 1d 01", SIGN, values, [2.0, -2.0, 2.0, 2.0, 2.0, -2.0, -2.0, -2.0, 2.0])


def test_every_bit_of_sign_with_zeros_has_its_place() -> None:
    """Even ones are larger in sum, 4 against 3: mean 2 of two, with the sign bit 0xC000. Then odd ones, of
    which one is told: 5 is 0x40A0, which the parity makes 5.03125."""
    golden("00 c0 07", SIGN, [3.0, 0.0, -1.0, 2.0, -0.0, 1.0], [2.0, 0.0, -2.0, 0.0, 0.0, 0.0])
    golden("a1 c0 0c", SIGN, [3.0, 0.0, -1.0, 5.0, 0.0], [0.0, 0.0, 0.0, 5.03125, 0.0])


def test_every_bit_of_int2_with_zeros_has_its_place() -> None:
    """Mean 5 of two even ones, so that the scale is 3.125: 0x4048. 8 is beyond twice the scale."""
    golden("48 c0 17 00", INT2, [8.0, 0.0, -2.0, 1.0, 0.0], [9.375, 0.0, -3.125, 0.0, 0.0])


def test_every_bit_of_int2_has_its_place() -> None:
    """Mean 3.2, so that the scale is 2: 0x4000. 4 is not beyond twice the scale."""
    values = [4.0, -1.0, 1.0, -8.0, 2.0]
    golden("00 40 91 01", INT2, values, [2.0, -2.0, 2.0, -6.0, 2.0])


def test_every_bit_of_int4_has_its_place() -> None:
    """The largest is 14, so that the scale is 2: 0x4000. Half a step goes to the even one."""
    golden("00 40 1f 98 06", INT4, [14.0, -14.0, 1.0, 1.5, -3.0], [14.0, -14.0, 0.0, 2.0, -4.0])


@low_codecs
@pytest.mark.parametrize("count", COUNTS)
def test_codes_lie_side_by_side_and_spare_bits_are_zero(codec: ValueCodec, count: int) -> None:
    """Read bit by bit: block after block of codes, all set in the way that sets the highest bit of each."""
    bits, blocks = BITS[codec.name], -(-count // BLOCK)
    values = torch.linspace(0.5, 1.0, count)
    data = codec.encode(values)
    assert data.numel() == codec.predict_size(count, values.dtype) == 2 * blocks + -(-count * bits // 8)
    line = "".join(f"{byte:08b}"[::-1] for byte in data[2 * blocks :].tolist())
    codes = [int(line[j * bits : (j + 1) * bits][::-1], 2) for j in range(count)]
    assert "1" not in line[count * bits :]
    levels = believed(codec, values).double() / scales(codec, values)
    meaning = {1: {1: 1}, 2: {1: 1, 3: 3}, 4: {8 + step: step for step in range(8)}}[bits]
    assert [meaning[code] for code in codes] == levels.tolist()


@low_codecs
@float_types
@given(data=st.data())
def test_rows_are_encoded_each_for_itself(codec: ValueCodec, dtype: torch.dtype, data: st.DataObject) -> None:
    row = data.draw(some_values(dtype, anything))
    rows = torch.stack([row, -row, row.flip(0), row * 3])
    together = codec.encode(rows.view(2, 2, -1))
    size = codec.predict_size(row.numel(), dtype)
    assert together.shape == (2, 2, size)
    assert same_bits(together.view(4, size), torch.stack([codec.encode(each) for each in rows]))
    gaps = torch.stack([rows, rows], -1)[..., 0]
    assert same_bits(codec.encode(gaps), together.view(4, size)), "values need not lie side by side"


@float_types
@given(data=st.data())
def test_sign_keeps_the_sign_and_the_mean_magnitude(dtype: torch.dtype, data: st.DataObject) -> None:
    values = without_zeros(data.draw(some_values(dtype)))
    back, scale = believed(SIGN, values).double(), scales(SIGN, values)
    assert torch.equal(back, torch.where(values >= 0, scale, -scale))
    for part, sent in zip(values.split(BLOCK), scale.split(BLOCK), strict=True):
        if part.numel():
            mean = part.double().abs().mean()
            assert abs(float(sent[0]) - mean) <= (2.0**-8 + 2.0**-20) * mean + 2.0**-133


@float_types
@given(data=st.data())
def test_int2_takes_the_nearest_of_its_levels(dtype: torch.dtype, data: st.DataObject) -> None:
    values = without_zeros(data.draw(some_values(dtype)))
    back, scale = believed(INT2, values).double(), scales(INT2, values)
    levels = torch.stack([-3 * scale, -scale, scale, 3 * scale])
    assert bool((levels == back).any(0).all())
    assert torch.equal((values.double() - back).abs(), (values.double() - levels).abs().amin(0))
    for part, sent in zip(values.split(BLOCK), scale.split(BLOCK), strict=True):
        if part.numel():
            wanted = 0.625 * part.double().abs().mean()
            assert abs(float(sent[0]) - wanted) <= (2.0**-8 + 2.0**-20) * wanted + 2.0**-133


@float_types
@given(data=st.data())
def test_int4_is_within_half_a_step_and_zero_stays_zero(dtype: torch.dtype, data: st.DataObject) -> None:
    values = data.draw(some_values(dtype))
    back, scale = believed(INT4, values), scales(INT4, values)
    error = (back.double() - values.double()).abs()
    assert bool((error <= scale * (0.5 + 2.0**-20) + 2.0**-131).all())
    assert not bool(back[values == 0].any())
    for part, sent in zip(values.split(BLOCK), scale.split(BLOCK), strict=True):
        if part.numel():
            wanted = part.double().abs().max() / 7
            assert abs(float(sent[0]) - wanted) <= (2.0**-8 + 2.0**-20) * wanted + 2.0**-133


@pytest.mark.parametrize(("ones", "sent"), [((128, 64), 2.0**16), ((1, 129), 2.0**16 + 2.0**9)])
def test_means_are_sums_of_halves(ones: tuple[int, int], sent: float) -> None:
    """The first sum lies midway between two scales; a one is lost beside it, but not two that met before."""
    values = torch.full((BLOCK,), 1e-30)
    values[0] = 2.0**24 + 2.0**16
    values[list(ones)] = 1.0
    assert believed(SIGN, values).tolist() == [sent] * BLOCK


@low_codecs
@float_types
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("tiny", [0.0, -0.0, 1e-45, -1e-42])
def test_blocks_too_small_for_a_scale_become_zeros(
    codec: ValueCodec, dtype: torch.dtype, count: int, tiny: float
) -> None:
    values = torch.full((count,), tiny, dtype=dtype)
    assert not bool(believed(codec, values / 1024).any())
    assert bool(believed(codec, values.clamp(max=1.0) + 1).all()), "others do not"


@low_codecs
@float_types
@given(data=st.data())
def test_nothing_that_is_not_finite_is_turned_into_numbers(
    codec: ValueCodec, dtype: torch.dtype, data: st.DataObject
) -> None:
    values = data.draw(some_values(dtype, anything))
    back = believed(codec, values)
    for part, got in zip(values.split(BLOCK), back.split(BLOCK), strict=True):
        if not bool(part.isfinite().all()):
            assert not bool(got.isfinite().any())
        elif part.numel() and float(part.abs().max()) < 1e35:
            assert bool(got.isfinite().all())


@low_codecs
@float_types
@given(data=st.data())
def test_zeros_stay_zeros_and_of_the_rest_half_is_told(
    codec: ValueCodec, dtype: torch.dtype, data: st.DataObject
) -> None:
    """Whatever their pattern; and a block with zeros is nearer than one that tells nothing."""
    values = data.draw(some_values(dtype))
    source = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    kept = torch.rand(values.shape, generator=source) < data.draw(st.sampled_from([0.01, 0.3, 0.9, 0.999]))
    values = torch.where(kept, values, torch.tensor([0.0, -0.0], dtype=dtype).repeat(values.numel())[::2])
    back = believed(codec, values)
    assert not bool(back[values == 0].any())
    for part, got, scale in zip(
        *(x.split(BLOCK) for x in (values, back, scales(codec, values))), strict=True
    ):
        if codec is not INT4 and part.numel() and bool(scale[0].signbit()):
            assert bool((part == 0).any() & (part != 0).any())
            assert not (bool(got[::2].any()) and bool(got[1::2].any()))
            left, was = ((x.double() / scale[0]).square().sum() for x in (part - got, part))
            assert bool(left <= was * 1.02)


@pytest.mark.parametrize("codec", [INT2, SIGN], ids=["int2", "sign"])
@float_types
def test_blocks_with_zeros_that_no_scale_fits_have_none(codec: ValueCodec, dtype: torch.dtype) -> None:
    """Too small: nothing is told. Too large: nothing finite is. Not finite: the same, zeros or not."""
    tiny = torch.tensor([1e-45, 0.0, 1e-45, 1e-45, 0.0], dtype=dtype) / (1 if dtype == torch.float32 else 64)
    assert not bool(believed(codec, tiny).any())
    for odd in (3.4e38, torch.inf, -torch.inf, torch.nan):
        for place in range(4):
            values = torch.zeros(5, dtype=dtype)
            values[place] = odd
            back = believed(codec, values)
            fits = odd == 3.4e38 and codec is INT2  # whose scale is smaller
            assert bool(back.isfinite().all()) if fits else not bool(back.isfinite().any())
