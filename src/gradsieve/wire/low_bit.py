"""Values in four bits, two or one: bytes as `gradsieve.kernels.low_bit` defines them, whatever form runs."""

from __future__ import annotations

import torch
from torch import Tensor

from gradsieve import kernels
from gradsieve.kernels.blocks import Blocks

_FARTHEST = {4: 8.0, 2: 3.0, 1: 1.0}
"""In units of the scale, by bits: also of codes that nobody sends."""


class LowBit:
    """Codes of so many bits, and before them two bytes of scale for each block: of these blocks, where they
    are known, and otherwise of such as are full up to the last one."""

    def __init__(self, name: str, bits: int, blocks: Blocks | None = None) -> None:
        self.name, self.bits, self.blocks = name, bits, blocks

    def over(self, blocks: Blocks) -> LowBit:
        return LowBit(self.name, self.bits, blocks)

    def predict_size(self, count: int, dtype: torch.dtype) -> int:
        return kernels.low_bit_size(self.bits, count, self.blocks)

    def scales(self, count: int) -> int:
        return 2 * (kernels.low_bit_blocks(count) if self.blocks is None else self.blocks.number)

    def encode(self, values: Tensor) -> Tensor:
        return kernels.encode_low(self.bits, values, self.blocks)

    def decode(self, data: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        return kernels.decode_low(self.bits, data, count, dtype, self.blocks)

    def decode_into(self, data: Tensor, out: Tensor) -> None:
        kernels.decode_low_into(self.bits, data, out, self.blocks)

    def bounds(self, data: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        """The farthest that each block's codes can stand for. The sign of a scale is none of its size."""
        halves = data[..., : self.scales(count)].clone(memory_format=torch.contiguous_format)
        return halves.view(torch.bfloat16).to(dtype).abs_().mul_(_FARTHEST[self.bits])

    def decode_sum(self, data: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        return kernels.decode_low_sum(self.bits, data, count, dtype, self.blocks)
