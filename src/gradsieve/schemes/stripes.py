"""Stripes: the vector in stretches, one after the other; no index travels and nothing is selected.

1. In each step the next stretch, from where the last one ended to the end of the vector at most, then from
   its beginning again. Stretches between two ends are equally long, about k: as many as make it k elements a
   step in the long run.
2. Sum the values there in few bits (`agreed.py`).

Every element has its turn every 1/density steps, so that nothing waits longer, whatever its size. With error
feedback one bit a value does: a stretch of n/3 as signs costs as much as the largest n/100 with their values
and places, and tells more. One pass over a contiguous stretch, no random access; bytes are flat in P.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from gradsieve.comm.ops import Op
from gradsieve.schemes.agreed import Agreed, Values, asked_for_sum, sum_between
from gradsieve.schemes.base import log2_ceil
from gradsieve.types import Ctx, Outcome, Program, Sparse, Vector
from gradsieve.wire.values import VALUE_CODECS

BLOCK = 256
_LONG = 16 * BLOCK
"""Elements a rank from which on a stretch ends where its last owner's last block of codes does: what needs no
filling up need not be copied."""


@dataclass(frozen=True, kw_only=True)
class State:
    n: int
    cursor: int = 0
    """Where the next stretch begins."""
    ahead: int = 0
    """Elements sent so far beyond k a step."""


@dataclass(frozen=True, kw_only=True)
class Stripes(Agreed[State]):
    density: float = 0.3
    values: Values = "sign"

    reads_parts: ClassVar[bool] = True
    in_turn: ClassVar[bool] = True
    looks: ClassVar[float] = 0.0
    merges: ClassVar[float] = 0.0

    @property
    def is_whole(self) -> bool:
        return self.density == 1.0 and self.values == "exact"

    def whole(self) -> Stripes:
        return replace(self, density=1.0, values="exact")

    def begin(self, n: int, world: int, previous: State | None = None) -> State:
        """The place in turn is the same for every number of ranks."""
        return previous if previous is not None and previous.n == n else State(n=n)

    def step(self, acc: Tensor | Vector, state: State, ctx: Ctx) -> Program[Outcome[State]]:
        n = acc.numel()
        # 1.
        start, k = state.cursor, self.k(n)
        turns = max(1, (n - start + state.ahead) // k) if n else 1
        stop = start - (start - n) // turns
        if stop < n and stop - start > _LONG * ctx.world:
            stop -= (stop - start) % (BLOCK * ctx.world)
        # 2.
        total, given = yield from sum_between(acc, start, stop, self.values, ctx)
        state = State(n=n, cursor=stop % n if n else 0, ahead=min(n, max(0, state.ahead + stop - start - k)))
        return Outcome(Sparse.run(start, total, n), Sparse.run(start, given, n), state)

    def asks(self, n: int, world: int) -> Sequence[Op]:
        return asked_for_sum(self.k(n), self.values, world)

    def expected_words(self, n: int, world: int, state: State | None = None) -> float:
        size = VALUE_CODECS[self.values].predict_size(self.k(n), torch.float32)
        return size / 2 * (world - 1) / world

    def expected_rounds(self, n: int, world: int, state: State | None = None) -> int:
        """The all-to-all's messages, P - 1, go at the same time where the network lets them."""
        return 2 * log2_ceil(world) if self.values == "exact" else world - 1 + log2_ceil(world)
