"""Indices of one partition are written in few bytes, as many for every rank.

A row holds up to `capacity` sorted unique indices, each in 0..span-1 and relative to its partition. Rows of
all ranks go through one all-gather, so their size depends on (capacity, span) alone, never on the data.

    raw         four bytes an index, eight where span needs them
    bitmap      one bit for each of the span elements
    elias-fano  the low bits as they are, the lowest of all indices first; the high parts in unary, as a
                bitmap in which bit i + (high part of index i) is set

Encoding is torch on the indices' own device, with shapes known beforehand: nothing waits for a GPU. Decoding
is numpy, on the host, where the caller has brought the bytes of all ranks in one copy. A peer's bytes are not
trusted: what `decode` returns is safe to scatter with.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradsieve.errors import Malformed

Bytes = NDArray[np.uint8]
Integers = NDArray[np.int64]

_INT32_MAX = 2**31 - 1


class IndexCodec(ABC):
    """A codec is one way to write indices. `span` is at least 1, `capacity` at least 0."""

    name: str

    @abstractmethod
    def predict_size(self, capacity: int, span: int) -> int:
        """Returns the bytes of a row, whatever is in it."""

    @abstractmethod
    def encode(self, indices: Tensor, count: Tensor, capacity: int, span: int) -> Tensor:
        """Writes the first `count` of `capacity` int64 indices to a row. The others may be anything."""

    def decode(self, rows: Bytes, counts: Integers, capacity: int, span: int) -> Integers:
        """Reads the counts[r] indices of every row r, row behind row. A bad row r is refused as rank r's."""
        _refuse((counts < 0) | (counts > capacity), f"announced a count outside 0..{capacity}")
        indices = self._read(rows, counts, capacity, span)
        row = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        fine = (indices >= 0) & (indices < span)
        fine[1:] &= (indices[1:] > indices[:-1]) | (row[1:] > row[:-1])
        if not fine.all():
            bad = np.bincount(row[~fine], minlength=len(counts)) > 0
            _refuse(bad, f"sent indices that are not sorted, unique and inside 0..{span - 1}")
        return indices

    @abstractmethod
    def _read(self, rows: Bytes, counts: Integers, capacity: int, span: int) -> Integers:
        """Reads what `decode` checks. Counts are in 0..capacity already."""


class Raw(IndexCodec):
    name = "raw"

    def predict_size(self, capacity: int, span: int) -> int:
        return capacity * (4 if span <= _INT32_MAX else 8)

    def encode(self, indices: Tensor, count: Tensor, capacity: int, span: int) -> Tensor:
        dtype = torch.int32 if span <= _INT32_MAX else torch.int64
        return torch.where(_filled(indices, count), indices, span).to(dtype).view(torch.uint8)

    def _read(self, rows: Bytes, counts: Integers, capacity: int, span: int) -> Integers:
        table = rows.view(np.int32 if span <= _INT32_MAX else np.int64)
        return table[np.arange(capacity) < counts[:, None]].astype(np.int64)


class Bitmap(IndexCodec):
    name = "bitmap"

    def predict_size(self, capacity: int, span: int) -> int:
        return _bytes(span)

    def encode(self, indices: Tensor, count: Tensor, capacity: int, span: int) -> Tensor:
        return _set_bits(indices, _filled(indices, count), span)

    def _read(self, rows: Bytes, counts: Integers, capacity: int, span: int) -> Integers:
        return _find_bits(rows, counts, span)


class EliasFano(IndexCodec):
    name = "elias-fano"

    def predict_size(self, capacity: int, span: int) -> int:
        low, high = _parts(_low_bits(capacity, span), capacity, span)
        return _bytes(low) + _bytes(high)

    def encode(self, indices: Tensor, count: Tensor, capacity: int, span: int) -> Tensor:
        width = _low_bits(capacity, span)
        filled = _filled(indices, count)
        place = torch.arange(capacity, dtype=torch.int64, device=indices.device)
        number = torch.arange(width, dtype=torch.int64, device=indices.device)[:, None]
        planes = (indices >> number) & filled  # row b: bit b of every index, 0 where none is
        high = _set_bits((indices >> width) + place, filled, _parts(width, capacity, span)[1])
        return torch.cat([_pack(planes.to(torch.uint8).flatten()), high])

    def _read(self, rows: Bytes, counts: Integers, capacity: int, span: int) -> Integers:
        width = _low_bits(capacity, span)
        low_bits, high_bits = _parts(width, capacity, span)
        cut = _bytes(low_bits)
        indices = _find_bits(rows[:, cut:], counts, high_bits)
        indices -= np.arange(len(indices))  # less the place of each in its row
        indices += np.repeat(counts.cumsum() - counts, counts)
        indices <<= width
        kind = np.dtype(np.uint16 if width <= 16 else np.uint64)  # the narrow one, four times as many at once
        low = np.zeros((len(rows), capacity), kind)
        for number in range(width):
            plane = _bits_between(rows, number * capacity, (number + 1) * capacity).astype(kind)
            low |= np.left_shift(plane, number, out=plane)
        low = low[np.arange(capacity) < counts[:, None]]
        indices += low.view(np.int64) if kind.itemsize == 8 else low
        return indices


INDEX_CODECS: tuple[IndexCodec, ...] = (Raw(), EliasFano(), Bitmap())


def choose(capacity: int, span: int) -> IndexCodec:
    """Returns the codec with the smallest rows; all ranks agree, as the size depends on nothing else."""
    return min(INDEX_CODECS, key=lambda codec: codec.predict_size(capacity, span))


def _bytes(bits: int) -> int:
    return -(-bits // 8)


@lru_cache(maxsize=1024)  # asked for each row of each step, and of few sizes
def _low_bits(capacity: int, span: int) -> int:
    """Returns how many bits of an index are written as they are, so that a row is smallest."""
    return min(range(span.bit_length()), key=lambda width: sum(_parts(width, capacity, span)))


def _parts(width: int, capacity: int, span: int) -> tuple[int, int]:
    """Returns the bits of both parts: unary has one for each index and one for each high value."""
    return capacity * width, capacity + (span >> width) + 1


def _filled(indices: Tensor, count: Tensor) -> Tensor:
    return torch.arange(indices.numel(), dtype=torch.int64, device=indices.device) < count


def _pack(bits: Tensor) -> Tensor:
    """Packs eight ones and zeros into a byte, the first one lowest."""
    whole = torch.nn.functional.pad(bits, (0, -bits.numel() % 8)).view(-1, 8)
    return (whole << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(1, dtype=torch.uint8)


def _set_bits(positions: Tensor, filled: Tensor, length: int) -> Tensor:
    """Makes a bitmap of the filled positions. They are unique, so that adding bits is setting them."""
    inside = torch.where(filled, positions, 0)
    bits = (filled.to(torch.int64) << (inside & 7)).to(torch.uint8)
    return torch.zeros(_bytes(length), dtype=torch.uint8, device=positions.device).index_add_(
        0, inside >> 3, bits
    )


def _bits_between(rows: Bytes, start: int, stop: int) -> Bytes:
    """Unpacks some bits of every row, a byte each: all at once would be eight times what arrived."""
    first = start // 8
    bits = np.unpackbits(rows[:, first : _bytes(stop)], axis=1, bitorder="little")
    return bits[:, start - 8 * first : stop - 8 * first]


def _find_bits(rows: Bytes, counts: Integers, length: int) -> Integers:
    """Returns the positions of all set bits, row behind row. There must be counts[r] of them in row r."""
    bits = np.unpackbits(rows, axis=1, count=length, bitorder="little").view(np.bool_)
    _refuse(np.count_nonzero(bits, axis=1) != counts, "sent another number of indices than it announced")
    found = np.flatnonzero(bits)
    del bits  # as long as what is found
    found -= np.repeat(np.arange(len(counts)) * length, counts)
    return found


def _refuse(bad: NDArray[np.bool_], what: str) -> None:
    if bad.any():
        raise Malformed(f"rank {int(bad.argmax())} {what}")
