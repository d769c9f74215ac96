"""Real compute to set communication against: an MLP and a transformer encoder of a chosen size."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gradsieve.errors import ConfigError

_MLP_WIDTH, _MLP_BATCH = 2048, 32
_ENCODER_WIDTH, _ENCODER_TOKENS = 512, 256


def _mlp_layer() -> nn.Module:
    return nn.Sequential(nn.Linear(_MLP_WIDTH, _MLP_WIDTH), nn.ReLU())


def _encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(
        _ENCODER_WIDTH, nhead=8, dim_feedforward=2048, dropout=0.0, batch_first=True
    )


_LAYERS = {"mlp": _mlp_layer, "transformer": _encoder_layer}
_SHAPES = {"mlp": (_MLP_BATCH, _MLP_WIDTH), "transformer": (1, _ENCODER_TOKENS, _ENCODER_WIDTH)}
WORKLOADS = tuple(_LAYERS)


def build(workload: str, params: int) -> nn.Module:
    """As many layers as come closest to `params`."""
    layer = _LAYERS[workload]
    each = sum(p.numel() for p in layer().parameters())
    count = round(params / each)
    if count < 1:
        raise ConfigError(
            f"one layer of the {workload} has {each:,} parameters: ask for at least half of that"
        )
    return nn.Sequential(*(layer() for _ in range(count)))


def batch_for(workload: str) -> tuple[Tensor, Tensor]:
    """One rank's inputs and targets."""
    shape = _SHAPES[workload]
    return torch.randn(shape), torch.randn(shape)
