"""gTop-k (arXiv 1901.04359): a tree of merges that keeps k elements, for any number of ranks.

1. Select the k largest |acc| of this rank.
2. Go up a binomial tree: in the round with gap g = 1, 2, 4, ... rank r with r mod 2g = g hands its entries
   to rank r - g.
3. There, add up entries with equal index and keep the k largest sums.
4. Rank 0 broadcasts the entries that are left.
5. Spend the own elements that were selected and are in the final set.
6. Take back what was dropped in the own merges at an index that came through by another branch.

The paper stops after step 5: what a merge drops at an index of the final set is zeroed by those who gave it
and yet never applied, so that it is lost (`paper=True`, for comparison only: it breaks the law).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradsieve.comm.ops import Broadcast, Exchange
from gradsieve.kernels import largest, sum_by_index
from gradsieve.schemes.base import Scheme, Stateless, log2_ceil
from gradsieve.schemes.baselines.topk import pack_entries
from gradsieve.types import Ctx, Outcome, Program, Sparse
from gradsieve.wire.check import row_increasing
from gradsieve.wire.pairs import from_bits, index_dtype


@dataclass(frozen=True, kw_only=True)
class GTopK(Scheme[Stateless]):
    # The published rule: what merges drop is not taken back.
    paper: bool = False

    def begin(self, n: int, world: int, previous: Stateless | None = None) -> Stateless:
        return Stateless()

    def step(self, acc: Tensor, state: Stateless, ctx: Ctx) -> Program[Outcome[Stateless]]:
        n, k, rank = acc.numel(), self.k(acc.numel()), ctx.rank
        # 1.
        mine = largest(acc, k)
        held, dropped = Partial(mine, acc[mine], torch.zeros_like(acc[mine])), []
        nothing = torch.empty(0, dtype=index_dtype(n, acc.dtype), device=acc.device)
        for gap in (1 << level for level in range(log2_ceil(ctx.world))):
            # 2. A rank with nothing to do talks to itself, so that all ranks issue the same op.
            if rank % (2 * gap) == gap:
                yield Exchange(_packed(held, k, n), to=rank - gap, source=rank - gap, receive=0)
            elif rank % (2 * gap) == 0 and rank + gap < ctx.world:
                message = yield Exchange(nothing.clone(), to=rank + gap, source=rank + gap, receive=2 * k)
                entries = unpacked(message, acc.dtype, n, f"indices in step {ctx.step} of rank {rank + gap}")
                # 3.
                held, lost = _merged(held, *entries, k, n)
                dropped.append(lost)
            else:
                yield Exchange(nothing.clone(), to=rank, source=rank, receive=0)
        # 4.
        message = yield Broadcast(_packed(held, k, n), root=0)
        final, total = unpacked(message, acc.dtype, n, f"indices in step {ctx.step} of the root, rank 0")
        # 5. and 6.
        spent = _published(mine, acc, final) if self.paper else _spent(held, dropped, final, n)
        return Outcome(Sparse(final, total, n), spent, state)


@dataclass(frozen=True, slots=True)
class Partial:
    """Entries on their way up the tree, sorted by index; a sum is `own + others`.

    Kept apart, since a drop undoes `own` by not spending it: taken back as one sum, a large own value would
    round away what small ones others gave.
    """

    indices: Tensor
    # This rank's elements; zero where it selected none.
    own: Tensor
    # What it received.
    others: Tensor

    def where(self, marks: Tensor) -> Partial:
        return Partial(self.indices[marks], self.own[marks], self.others[marks])


def _merged(held: Partial, indices: Tensor, values: Tensor, k: int, n: int) -> tuple[Partial, Partial]:
    """The k largest sums, and the rest. A sum of zero is an entry as well: both who gave it get rid of it."""
    union, others = sum_by_index(torch.cat([held.indices, indices]), torch.cat([held.others, values]), n)
    own = torch.zeros_like(others)
    own[torch.searchsorted(union, held.indices)] = held.own
    kept = torch.zeros_like(union, dtype=torch.bool)
    kept[torch.topk((own + others).abs(), min(k, union.numel()), sorted=False).indices] = True
    both = Partial(union, own, others)
    return both.where(kept), both.where(~kept)


def _spent(held: Partial, dropped: list[Partial], final: Tensor, n: int) -> Sparse:
    """Own elements that this rank passed on, less what it dropped of others, where either was applied."""
    indices = torch.cat([held.indices, *(lost.indices for lost in dropped)])
    values = torch.cat([held.own, *(-lost.others for lost in dropped)])
    applied = torch.isin(indices, final)
    return Sparse(*sum_by_index(indices[applied], values[applied], n), n)


def _published(mine: Tensor, acc: Tensor, final: Tensor) -> Sparse:
    applied = mine[torch.isin(mine, final)]
    return Sparse(applied, acc[applied], acc.numel())


def _packed(held: Partial, k: int, n: int) -> Tensor:
    """k indices, then the bits of k sums; filled up with index n, which is nowhere."""
    return pack_entries(held.indices, held.own + held.others, k, n).flatten()


def unpacked(message: Tensor, dtype: torch.dtype, n: int, what: str) -> tuple[Tensor, Tensor]:
    """Checked indices and values."""
    row, bits = message.view(2, -1)
    row_increasing(row, n, what)
    present = row != n
    return row[present].long(), from_bits(bits[present], dtype)
