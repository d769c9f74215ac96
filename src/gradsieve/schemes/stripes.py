"""Stripes: the vector in stretches, one after the other; no index travels and nothing is selected.

1. In each step the next stretch, from where the last one ended to the end of the vector at most, then from
   its beginning again. Stretches between two ends are about equally long: whole blocks of codes, as many as
   make it k elements a step in the long run, and as many for each owner.
2. Sum the values there in few bits (`base.py`), in blocks that end where tensors do.

Every element is sent every 1/density steps, so that nothing is in the residual for longer, whatever its size.
With error feedback one bit a value does: a stretch of n/3 as signs costs as much as the largest n/100 with
their values and places, and sends more of the energy. One pass over a contiguous stretch, no random access;
bytes are flat in P.

A stretch has one block at least, so that more than k elements go where k is less than a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from gradsieve.kernels import blocks
from gradsieve.kernels.blocks import Layout
from gradsieve.schemes.base import Agreed, Values, sum_between
from gradsieve.types import Ctx, Outcome, Program, Sparse, Vector, static
from gradsieve.wire.values import VALUE_CODECS

# Part of a Gaussian's energy that codes of this kind send.
SENT: dict[Values, float] = {"sign": 0.637, "int2": 0.881, "int4": 0.985, "bf16": 0.99999, "exact": 1.0}
_LONG = 1 << 16


def cost(values: Values, world: int, layouts: Sequence[Layout] = ()) -> float:
    """Bits that the busiest rank moves for one element: there, and the sum back. Of a model of these units;
    of one in few large tensors, where none are given."""
    codec = VALUE_CODECS[values]
    layouts = layouts or [blocks.block_layout((_LONG,))]
    units = [layout.between(0, int(layout.edges[-1])) for layout in layouts]
    size = sum(codec.over(unit).predict_size(unit.count, torch.float32) for unit in units)
    return 2.0 * 8 * size / max(1, sum(unit.count for unit in units)) * (world - 1) / world


@dataclass(frozen=True, kw_only=True)
class State:
    n: int
    # Where the next stretch begins.
    cursor: int = 0
    # Elements sent so far beyond k a step.
    ahead: int = 0
    # Of the tensors that the vector is made of.
    sizes: tuple[int, ...] = static(())

    @property
    def layout(self) -> Layout:
        return blocks.block_layout(self.sizes or (self.n,))


@dataclass(frozen=True, kw_only=True)
class Stripes(Agreed[State]):
    density: float = 0.3
    values: Values = "sign"

    reads_parts: ClassVar[bool] = True
    round_robin: ClassVar[bool] = True

    @property
    def is_whole(self) -> bool:
        return self.density == 1.0 and self.values == "exact"

    def whole(self) -> Stripes:
        return replace(self, density=1.0, values="exact")

    def at_bits(self, bits: float, world: int, sizes: Sequence[Sequence[int]] = ((_LONG,),)) -> Stripes:
        """All of a stretch in codes of few bits, and longer stretches before wider codes, by what part of the
        energy that sends."""
        if world == 1:
            return self.whole()
        layouts = [blocks.block_layout(tuple(each)) for each in sizes]
        shares = {values: min(1.0, bits / cost(values, world, layouts)) for values in SENT}
        best = max(SENT, key=lambda values: shares[values] * SENT[values])
        return replace(self, values=best, density=shares[best])

    def begin(self, n: int, world: int, previous: State | None = None) -> State:
        return self.init_state([n], world, previous)

    def init_state(self, sizes: Sequence[int], world: int, previous: State | None = None) -> State:
        """The place in the round robin is the same for every number of ranks."""
        n, sizes = sum(sizes), tuple(sizes)
        if previous is not None and previous.n == n:
            return replace(previous, sizes=sizes)
        return State(n=n, sizes=sizes)

    def step(self, acc: Tensor | Vector, state: State, ctx: Ctx) -> Program[Outcome[State]]:
        n, layout = acc.numel(), state.layout
        # 1.
        start, stop = self._stretch(state, layout, ctx.world) if n else (0, 0)
        # 2.
        total, given = yield from sum_between(acc, start, stop, self.values, ctx, layout)
        k = self.k(n)
        ahead = min(n, max(-k, state.ahead + stop - start - k))
        state = replace(state, cursor=stop % n if n else 0, ahead=ahead)
        return Outcome(Sparse.run(start, total, n), Sparse.run(start, given, n), state)

    def _stretch(self, state: State, layout: Layout, world: int) -> tuple[int, int]:
        n, k, edges = state.n, self.k(state.n), layout.edges
        # A checkpoint of before may stop within a block, which is then sent from its beginning.
        first = layout.block_of(state.cursor)
        start = edges.item(first)
        turns = max(1, (n - start + state.ahead) // k)
        wanted = start - (start - n) // turns
        left = layout.between(start, n)
        number = max(1, left.nearest_to(wanted) - first)
        if world <= number < left.number:  # in bytes, all rows are as long as the longest: as many for each
            number = min(left.number, (number + world // 2) // world * world)
        return start, edges.item(first + number)
