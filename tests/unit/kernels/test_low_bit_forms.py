"""Values in few bits, compiled: the bytes of torch's form, what it decodes and adds up, bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gradsieve import kernels
from gradsieve.kernels import numba_forms, torch_low_bit
from gradsieve.kernels.blocks import Blocks
from gradsieve.testing.laws import same_bits
from unit.kernels.test_kernels_compiled import ODD, alike, seen_while_running

COUNTS = st.integers(0, 70) | st.sampled_from([255, 256, 257, 511, 512, 1031])

every_width = pytest.mark.parametrize("bits", [1, 2, 4])


@st.composite
def rows_of_values(draw: st.DrawFn) -> Tensor:
    """Rows that begin anywhere in a cache line, from nothing to overflow, with odd values or without."""
    rows, count, start = draw(st.integers(1, 4)), draw(COUNTS), draw(st.integers(0, 17))
    source = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    flat = torch.randn(start + rows * count, generator=source)
    flat *= torch.tensor(draw(st.sampled_from([1.0, 0.3, 1e-41, 1e-44, 1e37, 3e38, 0.0])))
    odd = torch.tensor(ODD)[torch.randint(0, len(ODD), flat.shape, generator=source)]
    replaced = torch.rand(flat.shape, generator=source) < draw(st.sampled_from([0.0, 0.005, 1.0]))
    return torch.where(replaced, odd, flat)[start:].view(rows, count)


def check_forms(bits: int, values: Tensor, blocks: Blocks | None = None) -> Tensor:
    """Whether both forms write the same bytes, and read them alike; these bytes."""
    with kernels.using("torch"):
        data = kernels.encode_low(bits, values, blocks)
    with kernels.using("compiled"):
        assert same_bits(kernels.encode_low(bits, values, blocks), data)
    check_decoding(bits, data, values.shape[-1], blocks)
    return data


def check_decoding(bits: int, data: Tensor, count: int, blocks: Blocks | None = None) -> None:
    with kernels.using("torch"):
        back = kernels.decode_low(bits, data, count, torch.float32, blocks)
    total = back[0].clone()
    for row in back[1:]:
        total += row
    for form in ("torch", "compiled"):
        with kernels.using(form):
            assert alike(kernels.decode_low(bits, data, count, torch.float32, blocks), back)
            assert alike(kernels.decode_low(bits, data[0], count, torch.float32, blocks), back[0])
            assert alike(kernels.decode_low_sum(bits, data, count, torch.float32, blocks), total)


@every_width
@given(values=rows_of_values())
def test_compiled_bytes_are_torchs(bits: int, values: Tensor) -> None:
    check_forms(bits, values)


@every_width
@given(world=st.integers(1, 4), count=COUNTS, before=st.integers(0, 5), seed=st.integers(0, 1000))
def test_any_bytes_decode_to_what_they_are_for_torch(
    bits: int, world: int, count: int, before: int, seed: int
) -> None:
    """Scales of either sign and of any magnitude, and codes that nobody sends; also amid a longer message."""
    shape = (world, before + kernels.low_bit_size(bits, count) + 1)
    source = torch.Generator().manual_seed(seed)
    message = torch.randint(0, 256, shape, dtype=torch.uint8, generator=source)
    check_decoding(bits, message[:, before:-1], count)


def test_the_compiled_form_writes_nothing_beside_its_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it makes is put amid other memory, which has to stay as it was."""
    made, real = [], torch.empty

    def surrounded(shape: int | tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        shape = (shape,) if isinstance(shape, int) else shape
        n = torch.Size(shape).numel()
        made.append(torch.full((n + 64,), 77, dtype=dtype, device=device))
        return made[-1][32 : 32 + n].view(shape)

    for bits in (1, 2, 4):
        for count in (0, 1, 9, 255, 256, 257, 300):
            values = torch.randn(3, count)
            monkeypatch.setattr(torch, "empty", surrounded)
            data = kernels.encode_low(bits, values)
            kernels.decode_low(bits, data, count, torch.float32)
            kernels.decode_low_sum(bits, data, count, torch.float32)
            monkeypatch.setattr(torch, "empty", real)
    assert len(made) == 2 * 3 * 3 * 7
    assert all(bool((each[:32] == 77).all() & (each[-32:] == 77).all()) for each in made)


def test_float32_end_to_end_on_the_cpu_is_compiled_and_all_else_is_torchs() -> None:
    x = torch.zeros(4, 8)
    assert kernels._low_bit(x, x.dtype) is numba_forms
    for other in (x.double(), x[:, ::2], x.t(), x.to("meta")):
        assert kernels._low_bit(other, other.dtype) is torch_low_bit
    with kernels.using("torch"):
        assert kernels._low_bit(x, x.dtype) is torch_low_bit


@pytest.mark.parametrize("form", ["torch", "compiled"])
def test_bytes_of_another_size_are_refused_and_not_read_past_their_end(form: str) -> None:
    data = torch.zeros(2, 5, dtype=torch.uint8)
    with kernels.using(form):
        for count in (16, 33):
            with pytest.raises(ValueError, match="bytes are"):
                kernels.decode_low(1, data, count, torch.float32)
            with pytest.raises(ValueError, match="bytes are"):
                kernels.decode_low_sum(1, data, count, torch.float32)
        assert kernels.decode_low(1, data, 24, torch.float32).shape == (2, 24)
        with pytest.raises(ValueError, match="bytes are"):
            kernels.decode_low(1, data.to(torch.int16), 24, torch.float32)
        for no_rows in (data[0], data[:0]):
            with pytest.raises(ValueError, match="rows to add up"):
                kernels.decode_low_sum(1, no_rows, 24, torch.float32)


def test_every_compiled_kernel_lets_other_threads_run() -> None:
    x = torch.zeros(1 << 22)
    data = kernels.encode_low(1, x)
    assert seen_while_running(lambda: kernels.encode_low(4, x))
    assert seen_while_running(lambda: kernels.decode_low(1, data, x.numel(), x.dtype))
    assert seen_while_running(lambda: kernels.decode_low_sum(1, data.expand(3, -1), x.numel(), x.dtype))
