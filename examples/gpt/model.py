"""A GPT as people know it: learned places, normalisation before each part, output tied to the input."""

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True)
class Shape:
    layers: int
    heads: int
    width: int
    context: int
    rate: float
    """AdamW's. A wider model wants a lower one."""


SIZES = {
    "tiny": Shape(2, 2, 32, 32, 3e-3),  # for tests
    "1M": Shape(4, 4, 128, 128, 3e-3),
    "3M": Shape(6, 4, 208, 128, 2e-3),
    "11M": Shape(6, 6, 384, 256, 1e-3),
    "26M": Shape(8, 8, 512, 256, 8e-4),
    "124M": Shape(12, 12, 768, 1024, 6e-4),  # GPT-2
}
"""Named by their parameters; tables of 1,024 symbols, that of GPT-2 of 50,304."""


class Block(nn.Module):
    """Attention to what came before, then a small network at every place."""

    def __init__(self, shape):
        super().__init__()
        self.heads = shape.heads
        self.before_attention, self.before_mlp = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)
        self.queries_keys_values = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.attended = nn.Linear(shape.width, shape.width, bias=False)
        self.wide = nn.Linear(shape.width, 4 * shape.width, bias=False)
        self.narrow = nn.Linear(4 * shape.width, shape.width, bias=False)

    def forward(self, x):
        x = x + self.attended(self.attention(self.before_attention(x)))
        return x + self.narrow(functional.gelu(self.wide(self.before_mlp(x))))

    def attention(self, x):
        parts = self.queries_keys_values(x).chunk(3, dim=-1)
        split = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        found = functional.scaled_dot_product_attention(*split, is_causal=True)
        return found.transpose(1, 2).flatten(-2)


class GPT(nn.Module):
    def __init__(self, shape, symbols):
        super().__init__()
        self.shape = shape
        self.symbols = nn.Embedding(symbols, shape.width)
        self.places = nn.Parameter(torch.empty(shape.context, shape.width))
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.last = nn.LayerNorm(shape.width)
        for matrix in (each for each in self.parameters() if each.dim() == 2):
            nn.init.normal_(matrix, std=0.02)
        # 2 additions a block: the sum of all of them is as large as one would be.
        for block in self.blocks:
            for into in (block.attended, block.narrow):
                nn.init.normal_(into.weight, std=0.02 / math.sqrt(2 * shape.layers))

    def forward(self, tokens, targets=None):
        """The mean loss, or without targets the scores of what could follow each token."""
        x = self.symbols(tokens) + self.places[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        scores = functional.linear(self.last(x), self.symbols.weight)
        if targets is None:
            return scores
        return functional.cross_entropy(scores.flatten(0, 1), targets.flatten())

    def decay_groups(self, decay):
        """For AdamW: matrices shrink; the scales and shifts of normalisation do not."""
        matrices = [each for each in self.parameters() if each.dim() == 2]
        others = [each for each in self.parameters() if each.dim() != 2]
        return [{"params": matrices, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]
