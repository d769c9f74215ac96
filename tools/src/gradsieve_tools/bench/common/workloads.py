"""Compute to set communication against, of a chosen size: an MLP, a transformer encoder, and `elsewhere`.

Ranks of a lab share this machine's processors. With `elsewhere` a layer waits in forward, as for an
accelerator, and computes for one row only: what is seen there is how long training waits for an exchange, and
not what it costs processors.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gradsieve.errors import ConfigError

_NARROWEST = 64
_SECONDS_ELSEWHERE = 0.05  # seconds of a layer in a step


@dataclass(frozen=True, slots=True)
class Workload:
    """Equal layers, one after the other."""

    layer: Callable[[int], nn.Module]
    widest: int
    rows: tuple[int, ...]  # the shape of one rank's inputs but for the width

    def params(self, width: int) -> int:
        with torch.device("meta"):
            return sum(p.numel() for p in self.layer(width).parameters())

    def width(self, params: int) -> int:
        """The widest that lets a layer fit in: all but small models have layers of `widest`."""
        width = self.widest
        while width > _NARROWEST and self.params(width) > params:
            width //= 2
        return width


def _mlp_layer(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.ReLU())


def _encoder_layer(width: int) -> nn.Module:
    return nn.TransformerEncoderLayer(
        width, nhead=8, dim_feedforward=4 * width, dropout=0.0, batch_first=True
    )


class _Wait(nn.Module):
    def forward(self, rows: Tensor) -> Tensor:
        time.sleep(_SECONDS_ELSEWHERE)
        return rows


def _elsewhere_layer(width: int) -> nn.Module:
    return nn.Sequential(_Wait(), nn.Linear(width, width))


_WORKLOADS = {
    "mlp": Workload(_mlp_layer, widest=2048, rows=(32,)),
    "transformer": Workload(_encoder_layer, widest=512, rows=(1, 256)),
    "elsewhere": Workload(_elsewhere_layer, widest=1024, rows=(1,)),
}
WORKLOADS = tuple(_WORKLOADS)


def check_size(workload: str, params: int) -> None:
    least = _WORKLOADS[workload].params(_NARROWEST)
    if params < least:
        raise ConfigError(f"the smallest {workload} has {least:,} parameters, not {params:,}: raise --params")


def build(workload: str, params: int) -> nn.Module:
    """Return as many layers as come closest to `params`."""
    check_size(workload, params)
    found = _WORKLOADS[workload]
    width = found.width(params)
    return nn.Sequential(*(found.layer(width) for _ in range(round(params / found.params(width)))))


def batch_for(workload: str, params: int) -> tuple[Tensor, Tensor]:
    """Return one rank's inputs and targets."""
    found = _WORKLOADS[workload]
    inputs = torch.randn((*found.rows, found.width(params)), dtype=torch.float32, device="cpu")
    return inputs, torch.randn_like(inputs)
