"""ExDyna with the rules and constants of the paper and its release, to compare `exdyna.py` against.

1. 1,024 blocks, their length rounded down to a multiple of 32; the remainder goes to the last partition.
2. Adjust: one sweep over neighbouring partitions; where one is above 1.05 times the mean load and the
   other below 1/1.05, one block changes sides.
3. In step t rank r owns partition (t + r) mod P.
4. Threshold: 1 / (2 sqrt k) at first; then times 1.005 / 1.00125 / 0.995 for a count above 1.1 k, inside
   the band, below k / 1.1. (Inside the band the release always raises it: the branch meant to lower it is
   never reached. Kept, since it is what was measured.)
5. Select in the own partition what is above the threshold.
6. Gather the counts, then the indices padded to the largest count, then all-reduce the values.

Kept out are the crashes of the release: fewer than 32,768 elements (blocks of at least one element), one
rank, more than 256 ranks (a partition may go down to one block), and its dummy index for empty selections.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradsieve.comm.ops import AllGather, AllReduce
from gradsieve.kernels import above
from gradsieve.schemes.base import Scheme, log2_ceil
from gradsieve.types import Ctx, Outcome, Program, Sparse
from gradsieve.wire.check import counts_within, strictly_increasing
from gradsieve.wire.frame import index_dtype

_BAND = 1.05


@dataclass(frozen=True, kw_only=True)
class State:
    n: int
    threshold: float
    blocks: Tensor
    """Blocks in each partition."""
    load: Tensor
    """Elements selected in each partition in the last step."""
    sent: int = -1
    """Elements selected in the last step; -1 before the first."""


@dataclass(frozen=True, kw_only=True)
class ExDynaPaper(Scheme[State]):
    blocks: int = 1024

    def begin(self, n: int, world: int, previous: State | None = None) -> State:
        count = max(world, min(self.blocks, n))
        blocks = torch.full((world,), count // world, dtype=torch.long, device="cpu")
        blocks[: count % world] += 1
        threshold = previous.threshold if previous else 0.5 / max(self.k(n), 1) ** 0.5
        return State(n=n, threshold=threshold, blocks=blocks, load=torch.zeros_like(blocks))

    def step(self, acc: Tensor, state: State, ctx: Ctx) -> Program[Outcome[State]]:
        n, world = state.n, ctx.world
        # 1. and 2.
        length = _block_length(n, int(state.blocks.sum()))
        blocks = _adjusted(state, length)
        cuts = torch.cat([blocks.new_zeros(1), blocks.cumsum(0) * length]).clamp(max=n)
        cuts[-1] = n
        # 3.
        part = (ctx.step + ctx.rank) % world
        start, stop = int(cuts[part]), int(cuts[part + 1])
        # 5. (4. is in `settle`)
        selected = above(acc[start:stop], state.threshold) + start
        # 6.
        counts = yield AllGather(torch.tensor([selected.numel()], dtype=torch.long, device=acc.device))
        counts = counts.flatten()
        counts_within(counts, n, f"elements in step {ctx.step}")
        row = torch.zeros(int(counts.max()), dtype=index_dtype(n), device=acc.device)
        row[: selected.numel()] = selected
        rows = yield AllGather(row)
        rows, load = rows.roll(ctx.step % world, 0), counts.roll(ctx.step % world)
        filled = torch.arange(row.numel(), dtype=torch.long, device=acc.device) < load[:, None]
        picked = rows[filled].long()
        strictly_increasing(picked, n, f"indices gathered in step {ctx.step}")
        mine = acc[picked]
        total = yield AllReduce(mine.clone())
        new = replace(state, blocks=blocks, load=load.cpu(), sent=picked.numel())
        return Outcome(Sparse(picked, total, n), Sparse(picked, mine, n), new)

    def settle(self, states: Sequence[State]) -> list[State]:
        # 4.
        ratio = sum(state.sent for state in states) / max(self.k(sum(state.n for state in states)), 1)
        factor = 1.005 if ratio > 1.1 else 1.00125 if ratio > 0.909 else 0.995
        threshold = states[0].threshold * factor
        return [replace(state, threshold=threshold) for state in states]

    def report(self, state: State) -> Mapping[str, float]:
        mean = max(state.sent, 1) / state.load.numel()
        return {"threshold": state.threshold, "imbalance": float(state.load.max()) / mean}

    def expected_words(self, n: int, world: int, state: State | None = None) -> float:
        imbalance, sent = (self.report(state)["imbalance"], state.sent) if state else (1.0, self.k(n))
        return sent * (imbalance + 2.0) * (world - 1) / world

    def expected_rounds(self, n: int, world: int, state: State | None = None) -> int:
        return 4 * log2_ceil(world)


def _block_length(n: int, blocks: int) -> int:
    length = n // blocks
    return length - length % 32 if length >= 32 else max(length, 1)


def _adjusted(state: State, length: int) -> Tensor:
    """One sweep over neighbours, loads carried along as blocks move. P is small beside the selection."""
    if state.sent <= 0:
        return state.blocks
    blocks, load = state.blocks.tolist(), state.load.tolist()
    world = len(blocks)
    mean = max(state.sent // world, 1)
    fewest = max(1, sum(blocks) // (4 * world))
    moved = int(length * state.sent / max(state.n, 1))
    for left in range(world - 1):
        right = left + 1
        for giver, taker in ((left, right), (right, left)):
            heavy, light = load[giver] / mean > _BAND, load[taker] / mean < 1 / _BAND
            if heavy and light and blocks[giver] > fewest:
                blocks[giver] -= 1
                blocks[taker] += 1
                load[giver] -= moved
                load[taker] += moved
                break
    return state.blocks.new_tensor(blocks)
