"""Top-k with all-gather (TopkA): every rank sends its own k largest elements to all ranks.

Traffic grows with the number of ranks, and so does the number of elements that come back (up to k P).

1. Select the k largest |acc| of this rank.
2. All-gather indices and values in one message.
3. Add up, in rank order, what the ranks sent for each index.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradsieve.comm.ops import AllGather
from gradsieve.kernels import largest, sum_by_index
from gradsieve.schemes.base import Scheme, Stateless
from gradsieve.types import Ctx, Outcome, Program, Sparse
from gradsieve.wire.check import rows_increasing
from gradsieve.wire.pairs import from_bits, index_dtype, to_bits


@dataclass(frozen=True, kw_only=True)
class TopK(Scheme[Stateless]):
    def begin(self, n: int, world: int, previous: Stateless | None = None) -> Stateless:
        return Stateless()

    def step(self, acc: Tensor, state: Stateless, ctx: Ctx) -> Program[Outcome[Stateless]]:
        n = acc.numel()
        # 1.
        mine = largest(acc, self.k(n))
        values = acc[mine]
        # 2. A rank may have fewer than k non-zero elements.
        messages = yield AllGather(pack_entries(mine, values, self.k(n), n))
        # 3.
        update = sum_entries(messages, n, acc.dtype, ctx)
        return Outcome(update, Sparse(mine, values, n), state)


def pack_entries(mine: Tensor, values: Tensor, length: int, n: int) -> Tensor:
    """Writes indices and values into one message of shape (2, length), filled up with index n."""
    message = torch.full((2, length), n, dtype=index_dtype(n, values.dtype), device=values.device)
    message[0, : mine.numel()] = mine
    message[1, : mine.numel()] = to_bits(values)
    return message


def sum_entries(messages: Tensor, n: int, dtype: torch.dtype, ctx: Ctx) -> Sparse:
    """Adds all ranks' packed entries up for each index, in rank order.

    Virtual ranks are handed one and the same reply; the sum is kept with it, so that it is formed once for
    all of them and not P times (a thousand ranks would add up a thousand times ten million entries).
    """
    known: Sparse | None = getattr(messages, "_gradsieve_sum", None)
    if known is not None:
        return known
    rows = messages[:, 0]
    rows_increasing(rows, n, f"indices in step {ctx.step}")
    present = rows != n
    picked, total = sum_by_index(rows[present].long(), from_bits(messages[:, 1][present], dtype), n)
    update = Sparse(picked, total, n)
    messages._gradsieve_sum = update  # type: ignore[attr-defined]
    return update
