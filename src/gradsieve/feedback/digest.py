"""A fingerprint of replicated values, to compare replicas by a few bytes."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

_CHUNK = 1 << 20
_WEIGHTS = 8191
"""Elements are weighted by their position modulo this prime, so that exchanged values show."""


def digest(tensors: Iterable[Tensor]) -> Tensor:
    """int64 sum over bits times weights, wrapping; formed on the tensors' own device, returned on the CPU."""
    total = 0
    for number, tensor in enumerate(tensors, start=1):
        flat = tensor.detach().contiguous().flatten()
        for start in range(0, flat.numel(), _CHUNK):
            bits = _bits(flat[start : start + _CHUNK])
            position = torch.arange(start, start + bits.numel(), device=bits.device)
            weighted = bits * (position % _WEIGHTS + 1)
            total = (total + number * int(weighted.sum())) % (1 << 63)
    return torch.tensor([total])


def _bits(flat: Tensor) -> Tensor:
    if not flat.is_floating_point():
        return flat.long()
    width = {2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    return flat.view(width).long()
