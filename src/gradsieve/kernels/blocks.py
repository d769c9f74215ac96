"""Where blocks of codes begin: each has a scale of its own, and none spans two tensors.

A vector is tensors end to end. Blocks of 256 elements are counted from the start of each tensor, so that a
tensor's last block may be shorter. This follows from the sizes alone: every rank computes the same, and
nothing of it travels. All of it is arrays, also for a thousand tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BLOCK = 256


class Layout:
    """All blocks of a vector."""

    def __init__(self, edges: NDArray[np.int64], buffer: int = BLOCK) -> None:
        self.edges, self.buffer = edges, buffer
        """Where blocks begin, from 0 on, and where the last one ends; and how long they are at most."""
        self.address = int(edges.ctypes.data)
        self._code_bytes: dict[int, NDArray[np.int64]] = {}
        self._on_device: dict[tuple[torch.device, int], tuple[Tensor, Tensor]] = {}

    def code_bytes(self, bits: int) -> NDArray[np.int64]:
        """Bytes of codes before each block, and in the end of all: each block's codes begin at a byte."""
        found = self._code_bytes.get(bits)
        if found is None:
            each = (np.diff(self.edges) * bits + 7) // 8
            found = self._code_bytes[bits] = np.concatenate([[0], np.cumsum(each)])
        return found

    def on(self, device: torch.device, bits: int) -> tuple[Tensor, Tensor]:
        """Edges and bytes of codes, copied there once."""
        if (device, bits) not in self._on_device:
            arrays = self.edges, self.code_bytes(bits)
            edges, code_bytes = (torch.from_numpy(array).to(device) for array in arrays)
            self._on_device[device, bits] = edges, code_bytes
        return self._on_device[device, bits]

    @cached_property
    def halved(self) -> tuple[Layout, NDArray[np.int64]]:
        """With blocks half as long; and where each of these is found there."""
        half, lengths = self.buffer // 2, np.diff(self.edges)
        pieces = 1 + (lengths > half)
        places = np.concatenate([[0], np.cumsum(pieces)])
        shift = half * (np.arange(places[-1], dtype=np.int64) - np.repeat(places[:-1], pieces))
        edges = np.concatenate([np.repeat(self.edges[:-1], pieces) + shift, self.edges[-1:]])
        return Layout(edges, half), places

    def block_of(self, place: int) -> int:
        """The block that holds this element; of a place beyond the last one, the last."""
        return max(0, int(np.searchsorted(self.edges[:-1], place, side="right")) - 1)

    def between(self, start: int, stop: int) -> Blocks:
        """From one edge to another."""
        first, last = np.searchsorted(self.edges, [start, stop]).tolist()
        return Blocks(self, first, last)


class Blocks:
    """Some of them, one after the other."""

    __slots__ = ("address", "count", "first", "last", "layout", "number", "start", "stop")

    def __init__(self, layout: Layout, first: int, last: int) -> None:
        self.layout, self.first, self.last, self.number = layout, first, last, last - first
        self.start, self.stop = layout.edges.item(first), layout.edges.item(last)
        self.count = self.stop - self.start
        """Elements."""
        self.address = layout.address + layout.edges.itemsize * first
        """Of their edges, for compiled kernels, which take the first one from all others."""

    @property
    def is_even(self) -> bool:
        """Whether all but the last are full."""
        full = (self.number - 1) * self.layout.buffer
        return self.number < 2 or self.layout.edges.item(self.last - 1) == self.start + full

    def size(self, bits: int) -> int:
        """Bytes of scales and codes."""
        code_bytes = self.layout.code_bytes(bits)
        return 2 * self.number + code_bytes.item(self.last) - code_bytes.item(self.first)

    def on(self, device: torch.device, bits: int) -> tuple[Tensor, Tensor]:
        """As `Layout.on`: also of these, where the first block begins need not be 0."""
        edges, code_bytes = self.layout.on(device, bits)
        return edges[self.first : self.last + 1], code_bytes[self.first : self.last + 1]

    def dealt(self, parts: int, bits: int) -> list[Blocks]:
        """In so many parts, as equal in bytes of scales and codes as whole blocks allow."""
        before = self.layout.code_bytes(bits)[self.first : self.last + 1]
        before = before - before[0] + 2 * np.arange(self.number + 1)
        cuts = self.first + _nearest(before, before[-1] * np.arange(parts + 1) // parts)
        return [Blocks(self.layout, *cut) for cut in pairwise(cuts.tolist())]

    def nearest_to(self, place: int) -> int:
        """The block that begins next to this element, or the end of the last one; of two, the lower one."""
        edges = self.layout.edges[self.first : self.last + 1]
        return self.first + int(_nearest(edges, np.array(place)))

    def halved(self) -> Blocks:
        """The same elements in blocks half as long."""
        layout, places = self.layout.halved
        return Blocks(layout, places.item(self.first), places.item(self.last))

    def split(self, most: int) -> list[Blocks]:
        """In pieces of at most so many elements, no fewer than a block may have: whole blocks."""
        edges, cuts = self.layout.edges, [self.first]
        while cuts[-1] < self.last:
            beyond = int(np.searchsorted(edges[: self.last + 1], edges[cuts[-1]] + most, side="right"))
            cuts.append(beyond - 1)
        return [Blocks(self.layout, *cut) for cut in pairwise(cuts)]


def lengths(blocks: Blocks, device: torch.device) -> Tensor:
    """Elements of each."""
    if blocks.is_even:
        left = torch.arange(blocks.count, 0, -blocks.layout.buffer, dtype=torch.int64, device=device)
        return left.clamp_(max=blocks.layout.buffer)
    return blocks.on(device, 8)[0].diff()


def spread(items: Tensor, blocks: Blocks, each: Tensor, buffer: int, total: int) -> Tensor:
    """`total` concatenated items, `each` of them a block, in as many rows of `buffer`; others are 0."""
    if blocks.is_even:
        spare = blocks.number * buffer - total
        filled = torch.nn.functional.pad(items, (0, spare)) if spare else items.contiguous()
        return filled.view(*items.shape[:-1], blocks.number, buffer)
    place = torch.arange(buffer, dtype=torch.int64, device=items.device)
    at = ((each.cumsum(0) - each)[:, None] + place).clamp_(max=total - 1)
    return torch.where(place < each[:, None], items[..., at], 0)


def closed(rows: Tensor, blocks: Blocks, each: Tensor, buffer: int, total: int) -> Tensor:
    """The reverse."""
    items = rows.flatten(-2)
    if blocks.is_even:
        return items[..., :total]
    number = torch.arange(blocks.number, dtype=torch.int64, device=rows.device)
    shift = (buffer * number - (each.cumsum(0) - each)).repeat_interleave(each, output_size=total)
    return items[..., shift + torch.arange(total, dtype=torch.int64, device=rows.device)]


def _nearest(edges: NDArray[np.int64], places: NDArray[np.int64]) -> NDArray[np.int64]:
    """Which of these is next to each place; of two, the lower one."""
    above = np.searchsorted(edges, places).clip(0, len(edges) - 1)
    below = (above - 1).clip(0)
    return np.where(places - edges[below] <= edges[above] - places, below, above)


@lru_cache(maxsize=1024)
def block_layout(sizes: tuple[int, ...]) -> Layout:
    """Of a vector made of tensors of these sizes."""
    return Layout(_edges(sizes))


@lru_cache(maxsize=64)
def even(count: int) -> Blocks:
    """Of a vector of which nobody knows tensors."""
    layout = Layout(_edges((count,)))
    return Blocks(layout, 0, len(layout.edges) - 1)


def _edges(sizes: Sequence[int]) -> NDArray[np.int64]:
    each = np.asarray(sizes, np.int64)
    blocks = -(-each // BLOCK)
    starts, firsts = np.cumsum(each) - each, np.cumsum(blocks) - blocks
    number = np.arange(int(blocks.sum()), dtype=np.int64) - np.repeat(firsts, blocks)
    return np.concatenate([np.repeat(starts, blocks) + BLOCK * number, [each.sum()]]).astype(np.int64)
