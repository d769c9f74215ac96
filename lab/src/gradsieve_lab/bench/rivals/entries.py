"""The largest few of every chunk as bytes, as SparseLoCo and DeMo send them.

A message: the places within the chunk, each in as few bits as the chunk's width needs, packed; then the
values, by one of the library's codecs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradsieve.schemes import VALUE_CODECS, Values


@dataclass(frozen=True, slots=True)
class Entries:
    """Of `chunks` rows of `width` elements, `k` each."""

    chunks: int
    width: int
    k: int
    values: Values

    @property
    def count(self) -> int:
        return self.chunks * self.k

    @property
    def bits(self) -> int:
        """Of one place."""
        return (self.width - 1).bit_length()

    @property
    def size(self) -> int:
        """Bytes of a message."""
        codec = VALUE_CODECS[self.values]
        return -(-self.count * self.bits // 8) + codec.predict_size(self.count, torch.float32)

    def encode(self, rows: Tensor) -> Tensor:
        places = rows.abs().topk(self.k, dim=1, sorted=False).indices.sort(1).values
        picked = rows.gather(1, places).flatten()
        return torch.cat([_packed(places.flatten(), self.bits), VALUE_CODECS[self.values].encode(picked)])

    def decode(self, message: Tensor) -> Tensor:
        """Rows in which all else is 0."""
        split = message.numel() - VALUE_CODECS[self.values].predict_size(self.count, torch.float32)
        places = _unpacked(message[:split], self.bits, self.count).view(self.chunks, self.k)
        values = VALUE_CODECS[self.values].decode(message[split:].contiguous(), self.count, torch.float32)
        rows = values.new_zeros(self.chunks, self.width)
        return rows.scatter_(1, places, values.view(self.chunks, self.k))


def _packed(numbers: Tensor, bits: int) -> Tensor:
    ones = (numbers[:, None] >> _up_to(bits, numbers)) & 1
    ones = torch.nn.functional.pad(ones.flatten(), (0, -ones.numel() % 8)).view(-1, 8)
    return (ones << _up_to(8, numbers)).sum(1).to(torch.uint8)


def _unpacked(data: Tensor, bits: int, count: int) -> Tensor:
    ones = (data[:, None].long() >> _up_to(8, data)) & 1
    ones = ones.flatten()[: count * bits].view(count, bits)
    return (ones << _up_to(bits, data)).sum(1)


def _up_to(bits: int, like: Tensor) -> Tensor:
    return torch.arange(bits, dtype=torch.int64, device=like.device)
