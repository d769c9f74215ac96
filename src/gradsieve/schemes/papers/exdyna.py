"""ExDyna with the rules and constants of the paper and its release, to compare `exdyna.py` against.

1. 1,024 blocks, their length rounded down to a multiple of 32; the remainder goes to the last partition.
2. Adjust: one sweep over neighbouring partitions; where one is above alpha times the mean load and the other
   below 1/alpha, `blk_move` blocks change sides, unless less than a quarter of the even share would be left.
3. In step t rank r owns partition (t + r) mod P. Select there what reaches the threshold; where nothing does,
   one element, round robin.
4. Gather the counts, then the indices padded to the largest count, then all-reduce the values.
5. Threshold: 1 / (2 sqrt k) at first; then times 1.005 / 1.00125 / 0.995 for a count above 1.1 k, inside
   the band, below k / 1.1.

Kept out are the crashes of the release: fewer than 32,768 elements (blocks are then shorter than 32), one
rank, more than 256 ranks (a partition may go down to one block), a dummy index in an empty partition.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradsieve.errors import ConfigError
from gradsieve.schemes.papers.exclusive import PublishedThreshold, Tracked, edges_of, exchange_partitions
from gradsieve.schemes.shares import evenly
from gradsieve.types import Ctx, Outcome, Program


@dataclass(frozen=True, kw_only=True)
class State(Tracked):
    # Blocks in each partition.
    blocks: Tensor


@dataclass(frozen=True, kw_only=True)
class ExDynaPaper(PublishedThreshold[State]):
    # Of the whole model.
    blocks: int = 1024
    # A block's length is a multiple of it.
    multiple: int = 32
    # Load over the mean, or mean over the load, beyond which a partition is out of balance.
    alpha: float = 1.05
    # Blocks that change sides at once.
    blk_move: int = 1
    # Part of an even share of the blocks below which no partition goes.
    least: float = 0.25

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.blocks, self.multiple, self.blk_move) < 1:
            raise ConfigError("blocks, multiple and blk_move must be at least 1")
        if self.alpha < 1 or not 0 <= self.least <= 1:
            raise ConfigError("alpha must be at least 1 and least in 0..1")

    def begin(self, n: int, world: int, previous: State | None = None) -> State:
        blocks = torch.tensor(evenly(max(world, min(self.blocks, n)), world), dtype=torch.long, device="cpu")
        threshold = self.first_threshold(n, previous)
        return State(n=n, threshold=threshold, blocks=blocks, load=torch.zeros_like(blocks))

    def step(self, acc: Tensor, state: State, ctx: Ctx) -> Program[Outcome[State]]:
        n = state.n
        # 1. and 2.
        length = self._length(n, int(state.blocks.sum()))
        blocks = self._adjusted(state, length)
        cuts = (edges_of(blocks.tolist()) * length).clamp(max=n)
        cuts[-1] = n
        # 3. and 4. (5. is in `next_states`)
        update, spent, load = yield from exchange_partitions(acc, cuts, state.threshold, ctx)
        return Outcome(update, spent, replace(state, blocks=blocks, load=load, sent=update.count))

    def _length(self, n: int, blocks: int) -> int:
        length = n // blocks
        return length - length % self.multiple if length >= self.multiple else max(length, 1)

    def _adjusted(self, state: State, length: int) -> Tensor:
        """Sweeps once over neighbours; loads are carried along as blocks move. P is small next to the
        selection."""
        if state.sent <= 0:
            return state.blocks
        blocks, load = state.blocks.tolist(), state.load.tolist()
        world = len(blocks)
        mean = max(state.sent // world, 1)
        fewest = max(1.0, self.least * sum(blocks) / world)
        moved = self.blk_move * int(length * state.sent / state.n)
        for left in range(world - 1):
            right = left + 1
            for giver, taker in ((left, right), (right, left)):
                heavy, light = load[giver] / mean > self.alpha, load[taker] / mean < 1 / self.alpha
                if heavy and light and blocks[giver] - self.blk_move >= fewest:
                    blocks[giver] -= self.blk_move
                    blocks[taker] += self.blk_move
                    load[giver] -= moved
                    load[taker] += moved
                    break
        return state.blocks.new_tensor(blocks)
