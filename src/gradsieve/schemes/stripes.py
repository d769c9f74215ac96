"""Stripes: the vector in stretches, one after the other; no index travels and nothing is selected.

1. In each step the next stretch, from where the last one ended to the end of the vector at most, then from
   its beginning again. Stretches between two ends are about equally long: whole blocks of codes, as many as
   make it k elements a step in the long run, and as many for each owner.
2. Sum the values there in few bits (`agreed.py`), in blocks that end where tensors do.

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

from gradsieve.comm.ops import Op
from gradsieve.kernels import blocks
from gradsieve.kernels.blocks import Layout
from gradsieve.schemes.agreed import Agreed, Values, asked_for_rows, asked_for_sum, sum_between
from gradsieve.schemes.base import log2_ceil
from gradsieve.types import Ctx, Outcome, Program, Sparse, Vector, static
from gradsieve.wire.values import VALUE_CODECS


@dataclass(frozen=True, kw_only=True)
class State:
    n: int
    cursor: int = 0
    """Where the next stretch begins."""
    ahead: int = 0
    """Elements sent so far beyond k a step."""
    sizes: tuple[int, ...] = static(())
    """Of the tensors that the vector is made of."""

    @property
    def layout(self) -> Layout:
        return blocks.block_layout(self.sizes or (self.n,))


@dataclass(frozen=True, kw_only=True)
class Stripes(Agreed[State]):
    density: float = 0.3
    values: Values = "sign"

    reads_parts: ClassVar[bool] = True
    round_robin: ClassVar[bool] = True
    looks: ClassVar[float] = 0.0
    merges: ClassVar[float] = 0.0

    @property
    def is_whole(self) -> bool:
        return self.density == 1.0 and self.values == "exact"

    def whole(self) -> Stripes:
        return replace(self, density=1.0, values="exact")

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

    def asks(self, n: int, world: int) -> Sequence[Op]:
        if self.values == "exact":
            return asked_for_sum(self.k(n), self.values, world)
        return asked_for_rows(round(self._row(State(n=n), world)), world)

    def expected_words(self, n: int, world: int, state: State | None = None) -> float:
        if self.values == "exact":
            return 2.0 * self.k(n) * (world - 1) / world
        return self._row(state or State(n=n), world) / 2 * (world - 1)

    def _row(self, state: State, world: int) -> float:
        """Bytes of a row in a step, in the mean."""
        every = state.layout.between(0, state.n)
        if not every.number:
            return 0.0
        size = VALUE_CODECS[self.values].over(every).predict_size(state.n, torch.float32)
        return max(1.0, self.k(state.n) * every.number / state.n / world) * size / every.number

    def expected_rounds(self, n: int, world: int, state: State | None = None) -> int:
        """The all-to-all's messages, P - 1, go at the same time where the network lets them."""
        return 2 * log2_ceil(world) if self.values == "exact" else world - 1 + log2_ceil(world)
