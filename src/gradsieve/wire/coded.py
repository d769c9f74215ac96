"""A vector in rows of few bits, written and read in pieces: none as long as it is stands beside its bytes.

Pieces begin where blocks of codes do, so that the bytes of a piece are those of a row as long as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from gradsieve.wire.values import ValueCodec

TOGETHER = 1 << 18
"""Values in a piece on a CPU, few enough to stay in a core's cache; a multiple of every codec's block."""


class Piece(NamedTuple):
    """Of a row: where its values are, and in the row's bytes their scales and codes."""

    start: int
    stop: int
    scales: slice
    codes: slice


@dataclass(frozen=True)
class Shape:
    """`count` values in as many rows as there are owners, all equally long: zeros fill up the last ones."""

    codec: ValueCodec
    rows: int
    count: int
    dtype: torch.dtype
    device: torch.device

    @cached_property
    def width(self) -> int:
        """Values in a row."""
        return -(-self.count // self.rows)

    @cached_property
    def longest(self) -> int:
        """Values in a piece, at most."""
        return min(self.width, TOGETHER) if self.device.type == "cpu" else self.width

    @cached_property
    def pieces(self) -> list[Piece]:
        """Of each row."""
        before = self.codec.scales(self.width)

        def bytes_to(place: int) -> tuple[int, int]:
            scales = self.codec.scales(place)
            return scales, before + self.codec.predict_size(place, self.dtype) - scales

        found = []
        for start in range(0, self.width, max(self.longest, 1)):
            stop = min(start + self.longest, self.width)
            scales, codes = zip(bytes_to(start), bytes_to(stop), strict=True)
            found.append(Piece(start, stop, slice(*scales), slice(*codes)))
        return found

    def cut(self, rows: Tensor, piece: Piece) -> Tensor:
        """Of whole rows those of a piece."""
        return torch.cat([rows[..., piece.scales], rows[..., piece.codes]], -1)

    def paste(self, row: Tensor, piece: Piece, data: Tensor) -> None:
        """The reverse, for one row."""
        cut = piece.scales.stop - piece.scales.start
        row[piece.scales], row[piece.codes] = data[:cut], data[cut:]

    def encode(self, read: Callable[[int, int], Tensor]) -> Tensor:
        """All rows, of the values that `read` gives from one place up to another."""
        rows = self._empty(self.rows)
        for number, row in enumerate(rows):
            for piece in self.pieces:
                first, last = (min(number * self.width + to, self.count) for to in piece[:2])
                values = read(first, last)
                if spare := piece.stop - piece.start - values.numel():
                    values = torch.nn.functional.pad(values, (0, spare))
                self.paste(row, piece, self.codec.encode(values))
        return rows

    def add_up(self, rows: Tensor) -> Tensor:
        """The sum of rows, a row as well."""
        total = self._empty(1)[0]
        for piece in self.pieces:
            self.paste(total, piece, self.codec.encode(self.exact(rows, piece)))
        return total

    def exact(self, rows: Tensor, piece: Piece) -> Tensor:
        """Their sum before it is rounded."""
        return self.codec.decode_sum(self.cut(rows, piece), piece.stop - piece.start, self.dtype)

    def _empty(self, rows: int) -> Tensor:
        size = self.codec.predict_size(self.width, self.dtype)
        return torch.empty((rows, size), dtype=torch.uint8, device=self.device)


@dataclass(frozen=True, slots=True)
class Sum:
    """A row that this rank rounded: its number, the rows it is the sum of, and itself."""

    number: int
    parts: Tensor
    total: Tensor

    def added(self, shape: Shape, piece: Piece) -> Tensor:
        """By rounding."""
        exact = shape.exact(self.parts, piece)
        return shape.codec.decode(shape.cut(self.total, piece), exact.numel(), exact.dtype).sub_(exact)


@dataclass(frozen=True, slots=True)
class Coded:
    """What rows stand for, computed when it is read: a `Stream`."""

    shape: Shape
    rows: Tensor
    rounded: Sum | None = None
    """With what this added."""

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
        room = torch.empty(shape.longest, dtype=shape.dtype, device=shape.device)
        for number, row in enumerate(self.rows):
            for piece in shape.pieces:
                left = shape.count - number * shape.width - piece.start
                if left <= 0:
                    return
                values = room[: piece.stop - piece.start]
                shape.codec.decode_into(shape.cut(row, piece), values)
                if rounded is not None and rounded.number == number:
                    values += rounded.added(shape, piece)
                yield values[:left]

    def bounds(self) -> Tensor:
        return self.shape.codec.bounds(self.rows, self.shape.width, self.dtype).flatten()
