"""Blocks of codes: each has a scale of its own, and none spans two tensors.

A vector is tensors end to end. Blocks of 256 elements are counted from the start of each tensor, so that a
tensor's last block may be shorter. This follows from the sizes alone: every rank computes the same, and
nothing of it travels. All of it is arrays, also for a thousand tensors. What the codes mean is in
`torch_low_bit.py`; the table that all forms but Triton's read them by is here.
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
# What the codes are made of: `torch_low_bit.py` has their meaning.
SHARE = 0.625  # of mean|x|, the lower of two levels
STEPS = 7  # the largest code of four bits, as a number
NOT_A_NUMBER = 0x7FC0  # as bfloat16, the one NaN that is sent: processors make different ones
INFINITE = 0x7F80  # infinity as bfloat16; what is not finite is no less
WITH_ZEROS = 0x8000  # in a scale as bfloat16


class Layout:
    """A layout has all blocks of a vector."""

    def __init__(self, edges: NDArray[np.int64], buffer: int = BLOCK) -> None:
        # Where blocks begin, from 0 on, and where the last one ends; and how long they are at most.
        self.edges, self.buffer = edges, buffer
        self.address = int(edges.ctypes.data)
        self._code_bytes: dict[int, NDArray[np.int64]] = {}
        self._on_device: dict[tuple[torch.device, int], tuple[Tensor, Tensor]] = {}

    def code_bytes(self, bits: int) -> NDArray[np.int64]:
        """Returns the bytes of codes before each block, and of all: a block's codes begin at a byte."""
        found = self._code_bytes.get(bits)
        if found is None:
            each = (np.diff(self.edges) * bits + 7) // 8
            found = self._code_bytes[bits] = np.concatenate([[0], np.cumsum(each)])
        return found

    def on(self, device: torch.device, bits: int) -> tuple[Tensor, Tensor]:
        """Returns edges and bytes of codes on this device, copied there once."""
        if (device, bits) not in self._on_device:
            arrays = self.edges, self.code_bytes(bits)
            edges, code_bytes = (torch.from_numpy(array).to(device) for array in arrays)
            self._on_device[device, bits] = edges, code_bytes
        return self._on_device[device, bits]

    @cached_property
    def halved(self) -> tuple[Layout, NDArray[np.int64]]:
        """Returns the layout with blocks half as long, and the place there of every block."""
        half, lengths = self.buffer // 2, np.diff(self.edges)
        pieces = 1 + (lengths > half)
        places = np.concatenate([[0], np.cumsum(pieces)])
        shift = half * (np.arange(places[-1], dtype=np.int64) - np.repeat(places[:-1], pieces))
        edges = np.concatenate([np.repeat(self.edges[:-1], pieces) + shift, self.edges[-1:]])
        return Layout(edges, half), places

    def block_of(self, place: int) -> int:
        """Returns the block that holds this element, or the last one."""
        return max(0, int(np.searchsorted(self.edges[:-1], place, side="right")) - 1)

    def between(self, start: int, stop: int) -> Blocks:
        """Returns the blocks from one edge to another."""
        first, last = np.searchsorted(self.edges, [start, stop]).tolist()
        return Blocks(self, first, last)


class Blocks:
    """Blocks of a layout, one after the other."""

    __slots__ = ("address", "count", "first", "last", "layout", "number", "start", "stop")

    def __init__(self, layout: Layout, first: int, last: int) -> None:
        self.layout, self.first, self.last, self.number = layout, first, last, last - first
        self.start, self.stop = layout.edges.item(first), layout.edges.item(last)
        self.count = self.stop - self.start  # elements
        # Of the edges, for compiled kernels, which take the first one from all others.
        self.address = layout.address + layout.edges.itemsize * first

    @property
    def is_even(self) -> bool:
        """Says whether all blocks but the last are full."""
        full = (self.number - 1) * self.layout.buffer
        return self.number < 2 or self.layout.edges.item(self.last - 1) == self.start + full

    def size(self, bits: int) -> int:
        """Returns the bytes of scales and codes."""
        code_bytes = self.layout.code_bytes(bits)
        return 2 * self.number + code_bytes.item(self.last) - code_bytes.item(self.first)

    def on(self, device: torch.device, bits: int) -> tuple[Tensor, Tensor]:
        """Does what `Layout.on` does; the first block need not begin at 0."""
        edges, code_bytes = self.layout.on(device, bits)
        return edges[self.first : self.last + 1], code_bytes[self.first : self.last + 1]

    def dealt(self, parts: int, bits: int) -> list[Blocks]:
        """Divides the blocks into parts as equal in bytes of scales and codes as whole blocks allow."""
        before = self.layout.code_bytes(bits)[self.first : self.last + 1]
        before = before - before[0] + 2 * np.arange(self.number + 1)
        cuts = self.first + _nearest(before, before[-1] * np.arange(parts + 1) // parts)
        return [Blocks(self.layout, *cut) for cut in pairwise(cuts.tolist())]

    def nearest_to(self, place: int) -> int:
        """Returns the edge nearest to this element, as a number of blocks; of two, the lower one."""
        edges = self.layout.edges[self.first : self.last + 1]
        return self.first + int(_nearest(edges, np.array(place)))

    def halved(self) -> Blocks:
        """Returns the same elements in blocks half as long."""
        layout, places = self.layout.halved
        return Blocks(layout, places.item(self.first), places.item(self.last))

    def split(self, most: int) -> list[Blocks]:
        """Cuts into pieces of whole blocks, with at most `most` elements, no fewer than a block may have."""
        edges, cuts = self.layout.edges, [self.first]
        while cuts[-1] < self.last:
            beyond = int(np.searchsorted(edges[: self.last + 1], edges[cuts[-1]] + most, side="right"))
            cuts.append(beyond - 1)
        return [Blocks(self.layout, *cut) for cut in pairwise(cuts)]


def lengths(blocks: Blocks, device: torch.device) -> Tensor:
    """Returns the elements of each block."""
    if blocks.is_even:
        left = torch.arange(blocks.count, 0, -blocks.layout.buffer, dtype=torch.int64, device=device)
        return left.clamp_(max=blocks.layout.buffer)
    return blocks.on(device, 8)[0].diff()


def spread(items: Tensor, blocks: Blocks, each: Tensor, buffer: int, total: int) -> Tensor:
    """Puts `total` concatenated items, `each[b]` of block b, into rows of `buffer`; the rest is 0."""
    if blocks.is_even:
        spare = blocks.number * buffer - total
        filled = torch.nn.functional.pad(items, (0, spare)) if spare else items.contiguous()
        return filled.view(*items.shape[:-1], blocks.number, buffer)
    place = torch.arange(buffer, dtype=torch.int64, device=items.device)
    at = ((each.cumsum(0) - each)[:, None] + place).clamp_(max=total - 1)
    return torch.where(place < each[:, None], items[..., at], 0)


def closed(rows: Tensor, blocks: Blocks, each: Tensor, buffer: int, total: int) -> Tensor:
    """Does the reverse of `spread`."""
    items = rows.flatten(-2)
    if blocks.is_even:
        return items[..., :total]
    number = torch.arange(blocks.number, dtype=torch.int64, device=rows.device)
    shift = (buffer * number - (each.cumsum(0) - each)).repeat_interleave(each, output_size=total)
    return items[..., shift + torch.arange(total, dtype=torch.int64, device=rows.device)]


def _nearest(edges: NDArray[np.int64], places: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the number of the edge next to each place; of two, the lower one."""
    above = np.searchsorted(edges, places).clip(0, len(edges) - 1)
    below = (above - 1).clip(0)
    return np.where(places - edges[below] <= edges[above] - places, below, above)


@lru_cache(maxsize=1024)
def block_layout(sizes: tuple[int, ...]) -> Layout:
    """Returns the layout of a vector made of tensors of these sizes."""
    return Layout(_edges(sizes))


@lru_cache(maxsize=64)
def even(count: int) -> Blocks:
    """Returns the blocks of a vector whose tensors are not known."""
    layout = Layout(_edges((count,)))
    return Blocks(layout, 0, len(layout.edges) - 1)


def _edges(sizes: Sequence[int]) -> NDArray[np.int64]:
    each = np.asarray(sizes, np.int64)
    blocks = -(-each // BLOCK)
    starts, firsts = np.cumsum(each) - each, np.cumsum(blocks) - blocks
    number = np.arange(int(blocks.sum()), dtype=np.int64) - np.repeat(firsts, blocks)
    return np.concatenate([np.repeat(starts, blocks) + BLOCK * number, [each.sum()]]).astype(np.int64)


def level_table(bits: int, device: torch.device) -> Tensor:
    """Returns what the codes in each of 256 bytes stand for, in units of the scale: a row a byte. For one and
    two bits, rows of blocks without zeros come first, then those with even elements sent, then odd."""
    code = _codes_in_bytes(bits, device)
    if bits == 4:
        return (code - 8).float()
    levels = (2 * (code & 1) - 1) * (1 + 2 * (code >> 1))
    wide = _codes_in_bytes(2 * bits, device)
    sent = (wide & 1) * ((wide & 2) - 1) * (1 + (wide >> 1 & 2))
    zeros = torch.zeros_like(sent)
    return torch.cat([levels, _in_turn(sent, zeros), _in_turn(zeros, sent)]).float()


def _in_turn(even: Tensor, odd: Tensor) -> Tensor:
    return torch.stack([even, odd], -1).flatten(1)


def _codes_in_bytes(bits: int, device: torch.device) -> Tensor:
    byte = torch.arange(256, dtype=torch.int32, device=device)
    place = torch.arange(0, 8, bits, dtype=torch.int32, device=device)
    return byte[:, None] >> place & (1 << bits) - 1
