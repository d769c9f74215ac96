"""A small honest scheme, and broken ones: each breaks one law, so that the check of that law can be seen red.

1. Every third place travels, in the next step the places beside them.
2. All-reduce the values there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradsieve.comm.ops import AllReduce
from gradsieve.schemes.base import Scheme
from gradsieve.types import Ctx, Outcome, Program, Sparse


@dataclass(frozen=True)
class State:
    seen: Tensor
    threshold: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Toy(Scheme[State]):
    """Keeps all laws."""

    def begin(self, n: int, world: int, previous: State | None = None) -> State:
        return State(torch.zeros(1))

    def step(self, acc: Tensor, state: State, ctx: Ctx) -> Program[Outcome[State]]:
        n = acc.numel()
        # 1.
        picked = torch.arange(n)[ctx.step % 3 :: 3]
        # 2.
        mine = acc[picked]
        total = yield AllReduce(mine.clone())
        new = replace(state, seen=state.seen + 1)
        return Outcome(Sparse(picked, total, n), Sparse(picked, mine, n), new)


@dataclass(frozen=True, kw_only=True)
class LosesMass(Toy):
    """Pays for its last element without giving it."""

    def step(self, acc: Tensor, state: State, ctx: Ctx) -> Program[Outcome[State]]:
        good = yield from super().step(acc, state, ctx)
        update = Sparse(good.update.indices[:-1], good.update.values[:-1], acc.numel())
        return replace(good, update=update)


@dataclass(frozen=True, kw_only=True)
class RoundsAway(Toy):
    """Sends half precision and pays the full price."""

    def step(self, acc: Tensor, state: State, ctx: Ctx) -> Program[Outcome[State]]:
        good = yield from super().step(acc, state, ctx)
        update = replace(good.update, source=good.update.values.half().to(acc.dtype))
        return replace(good, update=update)


@dataclass(frozen=True, kw_only=True)
class RankDependent(Toy):
    """The update of rank 1 differs in the sign of a zero or in the last bit."""

    def step(self, acc: Tensor, state: State, ctx: Ctx) -> Program[Outcome[State]]:
        good = yield from super().step(acc, state, ctx)
        nudge = torch.full_like(good.update.values, torch.inf if ctx.rank == 1 else -torch.inf)
        values = good.update.values.nextafter(nudge) if ctx.rank == 1 else good.update.values
        return replace(good, update=replace(good.update, source=values))


@dataclass(frozen=True, kw_only=True)
class DivergentState(Toy):
    """Remembers something of its own."""

    def step(self, acc: Tensor, state: State, ctx: Ctx) -> Program[Outcome[State]]:
        good = yield from super().step(acc, state, ctx)
        return replace(good, state=State(good.state.seen + ctx.rank))


@dataclass(frozen=True, kw_only=True)
class _OtherIndices(Toy):
    def other(self, indices: Tensor, n: int) -> Tensor:
        raise NotImplementedError

    def step(self, acc: Tensor, state: State, ctx: Ctx) -> Program[Outcome[State]]:
        good = yield from super().step(acc, state, ctx)
        indices = self.other(good.update.indices, acc.numel())
        return replace(good, update=replace(good.update, indices=indices))


@dataclass(frozen=True, kw_only=True)
class Unsorted(_OtherIndices):
    def other(self, indices: Tensor, n: int) -> Tensor:
        return indices.flip(0)


@dataclass(frozen=True, kw_only=True)
class Duplicate(_OtherIndices):
    def other(self, indices: Tensor, n: int) -> Tensor:
        return torch.cat([indices[:1], indices[:1], indices[2:]])


@dataclass(frozen=True, kw_only=True)
class BeyondTheEnd(_OtherIndices):
    def other(self, indices: Tensor, n: int) -> Tensor:
        return indices + n


@dataclass(frozen=True, kw_only=True)
class Negative(_OtherIndices):
    def other(self, indices: Tensor, n: int) -> Tensor:
        return indices - n


@dataclass(frozen=True, kw_only=True)
class ReadsTheSum(Toy):
    """Takes what it handed over for the reply, which it is with some engines."""

    def step(self, acc: Tensor, state: State, ctx: Ctx) -> Program[Outcome[State]]:
        total = acc.clone()
        yield AllReduce(total)
        return Outcome(Sparse.full(total), Sparse.full(acc), state)


@dataclass(frozen=True, kw_only=True)
class ReadsItsOwn(Toy):
    """Takes what it handed over for what it still has, which it is with others."""

    def step(self, acc: Tensor, state: State, ctx: Ctx) -> Program[Outcome[State]]:
        mine = acc.clone()
        total = yield AllReduce(mine)
        return Outcome(Sparse.full(total), Sparse.full(mine), state)


@dataclass(frozen=True, kw_only=True)
class ChoosesByTheSum(Toy):
    """Compares elements of what it handed over; no value of it goes any further."""

    def step(self, acc: Tensor, state: State, ctx: Ctx) -> Program[Outcome[State]]:
        n, energy = acc.numel(), acc.square()
        # 1.
        yield AllReduce(energy)
        picked = energy.topk(n // 3).indices.sort().values
        # 2.
        mine = acc[picked]
        total = yield AllReduce(mine.clone())
        return Outcome(Sparse(picked, total, n), Sparse(picked, mine, n), state)


@dataclass(frozen=True, kw_only=True)
class MutatesAcc(Toy):
    """Hands over `acc` itself."""

    def step(self, acc: Tensor, state: State, ctx: Ctx) -> Program[Outcome[State]]:
        total = yield AllReduce(acc)
        return Outcome(Sparse.full(total.clone()), Sparse.full(acc), state)


@dataclass(frozen=True, kw_only=True)
class MutatesState(Toy):
    def step(self, acc: Tensor, state: State, ctx: Ctx) -> Program[Outcome[State]]:
        state.seen.add_(1)
        return (yield from super().step(acc, state, ctx))


@dataclass(frozen=True, kw_only=True)
class NeverDense(Toy):
    """Density 1 makes no difference to it."""

    def exchange(self, acc: Tensor, state: State, ctx: Ctx) -> Program[Outcome[State]]:
        return (yield from self.step(acc, state, ctx))


@dataclass(frozen=True, kw_only=True)
class ThresholdPerBucket(Toy):
    def next_states(self, states: Sequence[State]) -> list[State]:
        return [replace(state, threshold=float(number)) for number, state in enumerate(states)]


@dataclass(frozen=True, kw_only=True)
class Starves(Toy):
    """Never looks at the first two elements of three."""

    def step(self, acc: Tensor, state: State, ctx: Ctx) -> Program[Outcome[State]]:
        return (yield from super().step(acc, state, replace(ctx, step=2)))


@dataclass(frozen=True, kw_only=True)
class FearsNan(Toy):
    """Crashes on a value that is not finite."""

    def step(self, acc: Tensor, state: State, ctx: Ctx) -> Program[Outcome[State]]:
        int(acc.sum())
        return (yield from super().step(acc, state, ctx))
