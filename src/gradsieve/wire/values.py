"""The values of a row are written in their own precision or in less.

What `decode(encode(v))` gives is what every receiver adds up, the sender included; the sender keeps the
difference to v in its residual, so that rounding delays and does not lose.

    exact   the values' own bits
    bf16    two bytes a value: eight significant bits, the range of float32
    int8    one byte a value, and before all values one for each block of 128, the exponent of its scale: the
            smallest power of two of which 127 reach max|v|, so that sums of what arrives are mostly exact
    int4    four bits a value, and two bytes a block of 256 (`gradsieve.kernels.torch_low_bit` has the layout)
    int2    two bits a value, the sign and which of two magnitudes
    sign    one bit a value, the sign; every value of a block has the same magnitude

Zeros decode to zeros, in all of them: a block of int2 or of signs that has some sends every second value.

A value that is not finite decodes to one that is not finite, where there are blocks with its whole block: an
overflow is seen, not turned into numbers. The same goes for values beyond what bf16 or the scale can hold.

All of it runs in torch on the values' own device, with shapes known beforehand. Any bytes of the right size
decode to floats; whether these are usable is for the caller to check.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from gradsieve import kernels
from gradsieve.kernels.blocks import Blocks, closed, even, lengths, spread

BLOCK = 128
_STEPS = 127
# Exponents of a scale that float32 can hold, and the one that stands for a block that is not finite.
_SMALLEST, _LARGEST, _NOT_FINITE = -127, 122, 127
# The largest code of any sender, in units of the scale, by bits.
_FARTHEST = {4: 8.0, 2: 3.0, 1: 1.0}


class ValueCodec(ABC):
    """A codec is one way to write float32 or float64 values."""

    name: str
    # Of a value, without what its block adds. An exact value counts as a float32.
    bits: int

    def over(self, blocks: Blocks) -> ValueCodec:
        """Returns the codec for a row of these blocks alone."""
        return self

    @abstractmethod
    def predict_size(self, count: int, dtype: torch.dtype) -> int:
        """Returns how many bytes `count` values take."""

    def scales(self, count: int) -> int:
        """Returns how many of these bytes are scales, which come before the codes."""
        return 0

    @abstractmethod
    def encode(self, values: Tensor) -> Tensor:
        """Turns values of shape (..., count) into bytes of shape (..., size); memory may be shared."""

    @abstractmethod
    def decode(self, data: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        """Turns bytes of shape (..., size) into values of shape (..., count)."""

    def decode_into(self, data: Tensor, out: Tensor) -> None:
        out.copy_(self.decode(data, out.shape[-1], out.dtype))

    def bounds(self, data: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        """Returns values, as few as possible: where these are finite, all values of the rows are."""
        return self.decode(data, count, dtype)

    def decode_sum(self, data: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        """Adds the values of bytes of shape (rows, size) up, in the order of the rows."""
        rows = self.decode(data, count, dtype)
        total = rows[0].clone()
        for row in rows[1:]:
            total += row
        return total


class Exact(ValueCodec):
    name, bits = "exact", 32

    def predict_size(self, count: int, dtype: torch.dtype) -> int:
        return count * dtype.itemsize

    def encode(self, values: Tensor) -> Tensor:
        return values.contiguous().view(torch.uint8)

    def decode(self, data: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        return _reread(data, count, dtype)


class BF16(ValueCodec):
    name, bits = "bf16", 16

    def predict_size(self, count: int, dtype: torch.dtype) -> int:
        return count * torch.bfloat16.itemsize

    def encode(self, values: Tensor) -> Tensor:
        return values.to(torch.bfloat16).contiguous().view(torch.uint8)

    def decode(self, data: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        return _reread(data, count, torch.bfloat16).to(dtype)


class Int8(ValueCodec):
    name, bits = "int8", 8

    def __init__(self, blocks: Blocks | None = None) -> None:
        self._blocks = blocks

    def over(self, blocks: Blocks) -> Int8:
        return Int8(blocks)

    def _halved(self, count: int) -> Blocks:
        return (self._blocks or even(count)).halved()

    def predict_size(self, count: int, dtype: torch.dtype) -> int:
        return self.scales(count) + count

    def scales(self, count: int) -> int:
        return self._halved(count).number

    def encode(self, values: Tensor) -> Tensor:
        count = values.shape[-1]
        cut = self._halved(count)
        each = lengths(cut, values.device)
        blocks = spread(values, cut, each, BLOCK, count)
        most = blocks.abs().amax(-1)
        mantissa, exponent = torch.frexp(most / _STEPS)
        exponent = exponent - (mantissa == 0.5).to(torch.int32)  # the smallest power of two that reaches
        usable = most.isfinite() & (exponent <= _LARGEST)
        exponent = torch.where(usable, exponent.clamp(min=_SMALLEST), _NOT_FINITE).to(torch.int8)
        scale = _power(exponent, values.dtype)[..., None]
        steps = (blocks / scale).nan_to_num(0.0, 0.0, 0.0).round()
        quantised = closed(steps.to(torch.int8), cut, each, BLOCK, count)
        return torch.cat([exponent.view(torch.uint8), quantised.view(torch.uint8)], -1)

    def decode(self, data: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        cut = self._halved(count)
        scale = _power(data[..., : cut.number].view(torch.int8), dtype)
        each = scale[..., None].expand(*scale.shape, BLOCK)
        of_values = closed(each, cut, lengths(cut, data.device), BLOCK, count)
        return data[..., cut.number :].view(torch.int8) * of_values


def _power(exponent: Tensor, dtype: torch.dtype) -> Tensor:
    """Computes 2 ** exponent exactly; NaN stands for a block that is not finite."""
    power = torch.ldexp(torch.ones_like(exponent, dtype=dtype), exponent.to(torch.int32))
    return torch.where(exponent == _NOT_FINITE, torch.nan, power)


class LowBit(ValueCodec):
    """Writes codes of few bits, as `gradsieve.kernels` defines them, after two bytes of scale for each block.
    Without `blocks`, all blocks but the last one are full."""

    def __init__(self, name: str, bits: int, blocks: Blocks | None = None) -> None:
        self.name, self.bits, self.blocks = name, bits, blocks

    def over(self, blocks: Blocks) -> LowBit:
        return LowBit(self.name, self.bits, blocks)

    def predict_size(self, count: int, dtype: torch.dtype) -> int:
        return kernels.low_bit_size(self.bits, count, self.blocks)

    def scales(self, count: int) -> int:
        return 2 * (kernels.low_bit_blocks(count) if self.blocks is None else self.blocks.number)

    def encode(self, values: Tensor) -> Tensor:
        return kernels.encode_low(self.bits, values, self.blocks)

    def decode(self, data: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        return kernels.decode_low(self.bits, data, count, dtype, self.blocks)

    def decode_into(self, data: Tensor, out: Tensor) -> None:
        kernels.decode_low_into(self.bits, data, out, self.blocks)

    def bounds(self, data: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        # A block's codes stand for no more than this, whichever they are; the sign of a scale is no size.
        halves = data[..., : self.scales(count)].clone(memory_format=torch.contiguous_format)
        return halves.view(torch.bfloat16).to(dtype).abs_().mul_(_FARTHEST[self.bits])

    def decode_sum(self, data: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        return kernels.decode_low_sum(self.bits, data, count, dtype, self.blocks)


_CODECS: tuple[ValueCodec, ...] = (
    *(Exact(), BF16(), Int8()),
    *(LowBit("int4", 4), LowBit("int2", 2), LowBit("sign", 1)),
)
VALUE_CODECS = {codec.name: codec for codec in _CODECS}


def _reread(data: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Reads bytes as `count` numbers of another type, from a copy: in a message they may not be aligned."""
    copied = data.clone(memory_format=torch.contiguous_format)
    return copied.flatten().view(dtype).view(*data.shape[:-1], count)
