"""What trainings of `compat.py` learn: a small regression.

Inputs of a rank are large in its own half of the features, so that a model that learnt from one rank alone is
seen to be worse; those held out are of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

WORLD, FEATURES, HIDDEN, BATCH, HELD_OUT = 2, 32, 64, 16, 1024
WEAK = 0.3
"""Size of the features that are another rank's."""
NOISE = 0.1


class Tables(nn.Module):
    """Rows for the largest features: all gradients are sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.EmbeddingBag(FEATURES, FEATURES, mode="sum", sparse=True)

    def forward(self, inputs: Tensor) -> Tensor:
        places = inputs.detach().topk(8, dim=1).indices
        return 0.1 * inputs + self.rows(places, per_sample_weights=inputs.detach().gather(1, places))


def network(kind: str) -> tuple[nn.Module, nn.Module]:
    """Encoder and decoder, of the same weights on all ranks."""
    if kind == "tables":
        return Tables(), Tables()
    bias = kind != "mlp without bias"
    encoder = nn.Sequential(
        nn.Linear(FEATURES, HIDDEN, bias=bias), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN, bias=bias), nn.Tanh()
    )
    decoder = nn.Linear(HIDDEN, FEATURES, bias=bias)
    dtype = torch.bfloat16 if kind == "mlp in bfloat16" else torch.float32
    return encoder.to(dtype), decoder.to(dtype)


@dataclass(frozen=True)
class Data:
    inputs: Tensor
    targets: Tensor

    @staticmethod
    def drawn(count: int, rank: int, seed: int) -> Data:
        random = torch.Generator().manual_seed(7)
        first = torch.randn(FEATURES, HIDDEN, generator=random) / FEATURES**0.5
        second = torch.randn(HIDDEN, FEATURES, generator=random) / HIDDEN**0.5
        random.manual_seed(100 * seed + rank)
        size = torch.full((FEATURES,), WEAK)
        size[rank::WORLD] = 1.0
        inputs = torch.randn(count, FEATURES, generator=random) * size
        noise = NOISE * torch.randn(count, FEATURES, generator=random)
        return Data(inputs, torch.tanh(1.5 * inputs @ first) @ second + noise)

    def loss(
        self, model: Callable[[Tensor], Tensor], dtype: torch.dtype, part: slice = slice(None)
    ) -> Tensor:
        return (model(self.inputs[part].to(dtype)).float() - self.targets[part]).square().mean()
