"""A vector is written to rows of few bits, and read from them, in pieces: no copy of it exists next to its
bytes.

Rows and pieces begin where blocks of codes do, so that the bytes of a piece are those of a row as long as it
is. Where a vector is made of tensors, blocks end with these and rows are as equal as whole blocks allow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from gradsieve.kernels.blocks import Blocks, Layout, even
from gradsieve.wire.values import VALUE_CODECS, ValueCodec

# Values in a piece on a CPU, few enough to stay in a core's cache; a multiple of every codec's block.
TOGETHER = 1 << 18


class Piece(NamedTuple):
    """A piece of a row has its own codec, as its blocks may be cut otherwise than the row's."""

    codec: ValueCodec
    # Of the vector's elements.
    start: int
    stop: int
    # Of the row's bytes.
    scales: slice
    codes: slice

    @property
    def length(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Shape:
    """A shape cuts `count` values into as many rows as there are owners, filled up to the same length."""

    codec: ValueCodec
    rows: int
    count: int
    dtype: torch.dtype
    device: torch.device
    # Of the vector. Without them rows have equally many values, and the last ones fewer.
    blocks: Blocks | None = None

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
        """The most values that a piece has."""
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
def shape_over(
    values: str,
    rows: int,
    dtype: torch.dtype,
    device: torch.device,
    layout: Layout,
    start: int,
    stop: int,
) -> Shape:
    """Returns the shape of the blocks from one edge to another; the same stretches come again and again."""
    return Shape(VALUE_CODECS[values], rows, stop - start, dtype, device, layout.between(start, stop))


@dataclass(frozen=True, slots=True)
class Sum:
    """The row that this rank summed and rounded, with its number and the rows it is the sum of."""

    number: int
    parts: Tensor
    total: Tensor

    def added(self, shape: Shape, piece: Piece) -> Tensor:
        """Computes what rounding the sum added to a piece of it."""
        exact = shape.exact(self.parts, piece)
        return piece.codec.decode(shape.cut(self.total, piece), exact.numel(), exact.dtype).sub_(exact)


@dataclass(frozen=True, slots=True)
class Coded:
    """Values of coded rows, computed when they are read: a `Stream`."""

    shape: Shape
    rows: Tensor
    # The values include what its rounding added.
    rounded: Sum | None = None

    @property
    def device(self) -> torch.device:
        return self.shape.device

    @property
    def dtype(self) -> torch.dtype:
        return self.shape.dtype

    def numel(self) -> int:
        return self.shape.count

    def pieces(self) -> Iterator[Tensor]:
        shape, rounded = self.shape, self.rounded
        buffer = torch.empty(shape.longest, dtype=shape.dtype, device=shape.device)
        for number, (row, pieces) in enumerate(zip(self.rows, shape.pieces, strict=True)):
            for piece in pieces:
                values = buffer[: piece.length]
                piece.codec.decode_into(shape.cut(row, piece), values)
                if rounded is not None and rounded.number == number:
                    values += rounded.added(shape, piece)
                yield values

    def bounds(self) -> Tensor:
        return self.shape.bounds(self.rows)
