"""Between an accelerator's memory and the host's, on the stream that this thread works on.

Pinned memory is copied by the device itself, while the host goes on. torch keeps freed pieces of it for the
next copy, and gives none away that a queued copy still reads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradsieve.types import can_pin


def to_host(tensor: Tensor) -> Tensor:
    """A copy. The host waits for it, and with it for all that was queued before."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=can_pin())
    host.copy_(tensor, non_blocking=True)
    torch.accelerator.current_stream(tensor.device).synchronize()
    return host


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """A copy that is queued; who works on the same stream finds it done."""
    return host.to(device, non_blocking=True)


def empty(shape: Sequence[int], like: Tensor) -> Tensor:
    """Memory of the host for what arrives, pinned where `like` is."""
    return torch.empty(shape, dtype=like.dtype, device="cpu", pin_memory=like.is_pinned())
