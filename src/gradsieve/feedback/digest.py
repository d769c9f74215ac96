"""A fingerprint of replicated values, to compare replicas by a few bytes."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

_CHUNK = 1 << 17
_MIX, _PLACE = 0x2545F4914F6CDD1D, 0x1E3779B97F4A7C15
"""Odd constants: multiplying by them loses no bit, and the shifts between carry high bits down."""


def digest(tensors: Iterable[Tensor]) -> Tensor:
    """64 bits of a hash over values, places and order, wrapping; formed on the tensors' own device."""
    total = 0
    for tensor in tensors:
        flat = tensor.detach().contiguous().flatten()
        for start in range(0, flat.numel(), _CHUNK):
            bits = _bits(flat[start : start + _CHUNK])
            place = torch.arange(start + 1, start + 1 + bits.numel(), dtype=torch.int64, device=bits.device)
            mixed = (bits ^ (place * _PLACE)) * _MIX
            mixed = (mixed ^ (mixed >> 29)) * _MIX
            mixed ^= mixed >> 32
            total = (total * 31 + int(mixed.sum())) % (1 << 64)
    signed = total - (1 << 64) if total >= 1 << 63 else total
    return torch.tensor([signed], dtype=torch.int64, device="cpu")


def _bits(flat: Tensor) -> Tensor:
    if not flat.is_floating_point():
        return flat.long()
    width = {2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    return flat.view(width).long()
