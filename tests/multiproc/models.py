"""Models whose gradients are known, and one that learns."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

SHAPES = ((64, 48), (48,), (8, 8), (40, 100), (100,), (70, 20), (33, 40))
"""Matrices that go sparse, and between them vectors and a small matrix that go dense: 10,004 elements."""

UNIT = 2.0**-7
"""Small enough for schemes that begin with a fixed threshold to keep something back."""


class Whole(nn.Module):
    """A loss linear in the parameters: the gradient of each is the number handed in for it, exactly.

    With whole numbers (times a power of two), and powers of two as world and rate, no sum rounds, so that
    laws hold to the last bit.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[torch.dtype] = ()) -> None:
        super().__init__()
        kinds = [*dtypes] + [torch.float32] * (len(shapes) - len(dtypes))
        zeros = [torch.zeros(shape, dtype=kind) for shape, kind in zip(shapes, kinds, strict=True)]
        self.tensors = nn.ParameterList(zeros)
        # Not in the order of registration, so that DDP has a reason to rebuild its buckets.
        self.order = sorted(range(len(shapes)), key=lambda place: place * 3 % 7)

    def forward(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """None leaves that parameter out of the graph."""
        pairs = [(self.tensors[place], gradients[place]) for place in self.order]
        terms = [(tensor * gradient).sum().float() for tensor, gradient in pairs if gradient is not None]
        return torch.stack(terms).sum()


def whole_numbers(
    shapes: Sequence[tuple[int, ...]], step: int, rank: int, seed: int = 0, micro: int = 0
) -> list[Tensor]:
    """Gradients for `Whole`, the same ones again for the same arguments: whole numbers times UNIT."""
    source = torch.Generator().manual_seed(((seed * 1009 + step) * 1009 + rank) * 1009 + micro)
    return [torch.randint(-8, 9, shape, generator=source) * UNIT for shape in shapes]


class Mlp(nn.Module):
    """Learns; three matrices of which two go sparse, and vectors."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layers = nn.Sequential(
            nn.Linear(32, 96), nn.Tanh(), nn.Linear(96, 64), nn.LayerNorm(64), nn.Tanh(), nn.Linear(64, 10)
        )

    def forward(self, batch: Tensor) -> Tensor:
        return self.layers(batch)


def batch(step: int, rank: int, size: int = 8) -> tuple[Tensor, Tensor]:
    """Inputs and labels for `Mlp`."""
    source = torch.Generator().manual_seed(step * 1009 + rank)
    return torch.randn(size, 32, generator=source), torch.randint(0, 10, (size,), generator=source)
