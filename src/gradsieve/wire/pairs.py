"""Indices and float values travel in one integer message."""

from __future__ import annotations

import torch
from torch import Tensor

_BITS = {torch.float32: torch.int32, torch.float64: torch.int64}


def index_dtype(n: int, values: torch.dtype = torch.float32) -> torch.dtype:
    """Returns the integer type that holds indices up to n and a value's bits: four bytes while they fit."""
    fits = n <= torch.iinfo(torch.int32).max and _BITS[values] is torch.int32
    return torch.int32 if fits else torch.int64


def to_bits(values: Tensor) -> Tensor:
    return values.contiguous().view(_BITS[values.dtype])


def from_bits(bits: Tensor, dtype: torch.dtype) -> Tensor:
    return bits.to(_BITS[dtype]).contiguous().view(dtype)


def to_pairs(indices: Tensor, values: Tensor, n: int) -> Tensor:
    """Writes a row of index and value bits for each element: such rows can be cut and joined anywhere."""
    dtype = index_dtype(n, values.dtype)
    return torch.stack([indices.to(dtype), to_bits(values).to(dtype)], 1)


def from_pairs(pairs: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns indices, not checked yet, and values."""
    indices, bits = pairs.t().contiguous()
    return indices.long(), from_bits(bits, dtype)
