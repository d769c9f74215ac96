"""Values are written to rows of bytes, in their own precision or in less, and read from them.

All receivers add up `decode(encode(v))`, the sender included; the sender keeps the difference to v in its
residual: rounding delays and does not lose.

    exact   the values' own bits
    bf16    two bytes a value: eight significant bits, the range of float32
    int8    one byte a value, and before all values one for each block of 128, the exponent of its scale: the
            smallest power of two of which 127 reach max|v|, so that sums of what arrives are mostly exact
    int4    four bits a value, and two bytes a block of 256 (`gradsieve.kernels.torch_low_bit` has the layout)
    int2    two bits a value, the sign and which of two magnitudes
    sign    one bit a value, the sign; every value of a block has the same magnitude

Zeros decode to zeros in all codecs: a block of int2 or of signs that has some sends every second value.

A value that is not finite decodes to one that is not finite, and its whole block if there are blocks: an
overflow is seen, not turned into numbers. The same goes for values beyond what bf16 or the scale can hold.

All of it runs on the values' own device, with shapes known beforehand. Any bytes of the right size decode to
floats; whether these are usable is for the caller to check.

A long vector is written and read in pieces: no copy of it exists next to its bytes. Rows and pieces begin
where blocks of codes do, and the bytes of a piece are those of a row of its length. If a vector is made of
tensors, blocks end with these and rows are as equal as whole blocks allow.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from gradsieve import kernels
from gradsieve.kernels.blocks import Blocks, Layout, closed, even, lengths, spread

BLOCK = 128
TOGETHER = (
    1 << 18
)  # values in a piece on a CPU: they stay in a core's cache; a multiple of every codec's block
_STEPS = 127
# Exponents of a scale that float32 can hold, and the one that stands for a block that is not finite.
_SMALLEST, _LARGEST, _NOT_FINITE = -127, 122, 127
# The largest code of any sender, in units of the scale, by bits.
_FARTHEST = {4: 8.0, 2: 3.0, 1: 1.0}


class ValueCodec(ABC):
    """A codec is one way to write float32 or float64 values."""

    name: str
    bits: int  # a value, without what its block adds; an exact value counts as a float32

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
        sizes = lengths(cut, values.device)
        blocks = spread(values, cut, sizes, BLOCK, count)
        most = blocks.abs().amax(-1)
        mantissa, exponent = torch.frexp(most / _STEPS)
        exponent = exponent - (mantissa == 0.5).to(torch.int32)  # the smallest power of two that reaches
        usable = most.isfinite() & (exponent <= _LARGEST)
        exponent = torch.where(usable, exponent.clamp(min=_SMALLEST), _NOT_FINITE).to(torch.int8)
        scale = _power(exponent, values.dtype)[..., None]
        steps = (blocks / scale).nan_to_num(0.0, 0.0, 0.0).round()
        quantised = closed(steps.to(torch.int8), cut, sizes, BLOCK, count)
        return torch.cat([exponent.view(torch.uint8), quantised.view(torch.uint8)], -1)

    def decode(self, data: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        cut = self._halved(count)
        scale = _power(data[..., : cut.number].view(torch.int8), dtype)
        in_blocks = scale[..., None].expand(*scale.shape, BLOCK)
        scales = closed(in_blocks, cut, lengths(cut, data.device), BLOCK, count)
        return data[..., cut.number :].view(torch.int8) * scales


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


# -- a vector in rows ------------------------------------------------------------------------------------


class Piece(NamedTuple):
    """A piece of a row has its own codec, because its blocks may be cut otherwise than the row's."""

    codec: ValueCodec
    start: int  # of the vector's elements
    stop: int
    scales: slice  # of the row's bytes
    codes: slice

    @property
    def length(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class RowLayout:
    """A layout cuts `count` values into as many rows as there are owners, filled up to the same length."""

    codec: ValueCodec
    rows: int
    count: int
    dtype: torch.dtype
    device: torch.device
    blocks: Blocks | None = None  # of the vector; without them all rows but the last have equally many values

    @cached_property
    def rows_of_blocks(self) -> list[Blocks]:
        if self.blocks is not None:
            return self.blocks.dealt(self.rows, self.codec.bits)
        width = -(-self.count // self.rows)
        starts = [min(row * width, self.count) for row in range(self.rows + 1)]
        return [even(stop - start) for start, stop in pairwise(starts)]

    @cached_property
    def starts(self) -> list[int]:
        return list(accumulate((blocks.count for blocks in self.rows_of_blocks), initial=0))

    @cached_property
    def sizes(self) -> list[int]:
        return [
            self.codec.over(blocks).predict_size(blocks.count, self.dtype) for blocks in self.rows_of_blocks
        ]

    @cached_property
    def size(self) -> int:
        return max(self.sizes)

    @cached_property
    def longest(self) -> int:
        """Returns how many values the longest piece has."""
        width = max(blocks.count for blocks in self.rows_of_blocks)
        return min(width, TOGETHER) if self.device.type == "cpu" else width

    @cached_property
    def pieces(self) -> list[list[Piece]]:
        return [self._pieces_of(*row) for row in zip(self.rows_of_blocks, self.starts, strict=False)]

    def _pieces_of(self, row: Blocks, start: int) -> list[Piece]:
        scales, codes = 0, self.codec.over(row).scales(row.count)
        found = []
        for part in row.split(TOGETHER) if self.device.type == "cpu" else [row]:
            codec, stop = self.codec.over(part), start + part.count
            beyond = scales + codec.scales(part.count)
            after = codes + codec.predict_size(part.count, self.dtype) - (beyond - scales)
            found.append(Piece(codec, start, stop, slice(scales, beyond), slice(codes, after)))
            scales, codes, start = beyond, after, stop
        return found

    def cut(self, rows: Tensor, piece: Piece) -> Tensor:
        """Takes a piece's bytes out of rows."""
        return torch.cat([rows[..., piece.scales], rows[..., piece.codes]], -1)

    def paste(self, row: Tensor, piece: Piece, data: Tensor) -> None:
        """Puts a piece's bytes into a row."""
        cut = piece.scales.stop - piece.scales.start
        row[piece.scales], row[piece.codes] = data[:cut], data[cut:]

    def encode(self, read: Callable[[int, int], Tensor]) -> Tensor:
        """Writes all rows, of the values that `read` returns from one place up to another."""
        rows = torch.empty((self.rows, self.size), dtype=torch.uint8, device=self.device)
        for row, size, pieces in zip(rows, self.sizes, self.pieces, strict=True):
            row[size:] = 0
            for piece in pieces:
                self.paste(row, piece, piece.codec.encode(read(piece.start, piece.stop)))
        return rows

    def add_up(self, number: int, rows: Tensor) -> Tensor:
        """Adds up what arrived for the row of this number, and returns the sum as a row."""
        total = torch.empty(self.size, dtype=torch.uint8, device=self.device)
        total[self.sizes[number] :] = 0
        for piece in self.pieces[number]:
            self.paste(total, piece, piece.codec.encode(self.exact(rows, piece)))
        return total

    def exact(self, rows: Tensor, piece: Piece) -> Tensor:
        """Adds a piece of several rows up, without rounding the sum to few bits."""
        return piece.codec.decode_sum(self.cut(rows, piece), piece.length, self.dtype)

    def bounds(self, rows: Tensor) -> Tensor:
        """Returns `ValueCodec.bounds` of all rows."""
        found = [
            self.codec.over(blocks).bounds(row[:size], blocks.count, self.dtype).flatten()
            for row, blocks, size in zip(rows, self.rows_of_blocks, self.sizes, strict=True)
        ]
        return torch.cat(found)


@lru_cache(maxsize=256)
def row_layout_over(
    values: str,
    rows: int,
    dtype: torch.dtype,
    device: torch.device,
    blocks: Layout,
    start: int,
    stop: int,
) -> RowLayout:
    """Returns the layout of the blocks from one edge to another; the same stretches come again and again."""
    return RowLayout(VALUE_CODECS[values], rows, stop - start, dtype, device, blocks.between(start, stop))


@dataclass(frozen=True, slots=True)
class RoundedSum:
    """The row that this rank summed and rounded, with its number and the rows it is the sum of."""

    number: int
    parts: Tensor
    total: Tensor

    def added(self, layout: RowLayout, piece: Piece) -> Tensor:
        """Computes what rounding the sum added to a piece of it."""
        exact = layout.exact(self.parts, piece)
        return piece.codec.decode(layout.cut(self.total, piece), exact.numel(), exact.dtype).sub_(exact)


@dataclass(frozen=True, slots=True)
class EncodedVector:
    """A `Stream` of the values of rows, computed when they are read."""

    layout: RowLayout
    rows: Tensor
    rounded: RoundedSum | None = None  # the values include what its rounding added

    @property
    def device(self) -> torch.device:
        return self.layout.device

    @property
    def dtype(self) -> torch.dtype:
        return self.layout.dtype

    def numel(self) -> int:
        return self.layout.count

    def pieces(self) -> Iterator[Tensor]:
        layout, rounded = self.layout, self.rounded
        buffer = torch.empty(layout.longest, dtype=layout.dtype, device=layout.device)
        for number, (row, pieces) in enumerate(zip(self.rows, layout.pieces, strict=True)):
            for piece in pieces:
                values = buffer[: piece.length]
                piece.codec.decode_into(layout.cut(row, piece), values)
                if rounded is not None and rounded.number == number:
                    values += rounded.added(layout, piece)
                yield values

    def bounds(self) -> Tensor:
        return self.layout.bounds(self.rows)
