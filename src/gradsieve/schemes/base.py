"""What a scheme is: which elements travel, how, and what each rank pays.

Adding one is a file next to this one with the same four parts in the same order (docstring with numbered
recipe, the scheme's settings, its State, `step`) and one line in `schemes/__init__.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Generic, Literal, TypeAlias

from torch import Tensor

from gradsieve.comm.ops import AllGather, AllReduce, AllToAll
from gradsieve.errors import ConfigError
from gradsieve.kernels.blocks import Layout
from gradsieve.types import (
    Ctx,
    Outcome,
    Program,
    Sparse,
    State,
    Stream,
    Vector,
    check_density,
    gathered,
    target_count,
)
from gradsieve.wire.values import VALUE_CODECS, EncodedVector, RoundedSum, RowLayout, row_layout_over

Values: TypeAlias = Literal["exact", "bf16", "int8", "int4", "int2", "sign"]


@dataclass(frozen=True)
class Stateless:
    """A scheme that remembers nothing has this state."""


def log2_ceil(world: int) -> int:
    """Returns the rounds of the best broadcast or gather among `world` ranks."""
    return (world - 1).bit_length()


@dataclass(frozen=True, kw_only=True)
class Scheme(ABC, Generic[State]):
    """A scheme is a frozen dataclass: its fields are its settings, and its State travels through `step`."""

    # Share of the elements that travels each step.
    density: float = 0.001

    # True where every step spends everything: such a scheme needs no residual.
    lossless: ClassVar[bool] = False

    # True for the one scheme that never communicates.
    no_comm: ClassVar[bool] = False

    # True where `step` also takes a Vector, and reads of it only what it needs.
    reads_parts: ClassVar[bool] = False

    # True for published rules: papers apply them to the whole model, which is then one unit.
    whole_model: ClassVar[bool] = False

    # True where every element is sent within 1/density steps: small tensors need no way of their own.
    round_robin: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_density(self.density)

    @property
    def remembers(self) -> bool:
        """Says whether what a step sends depends on the steps before it."""
        return not isinstance(self.begin(1, 1), Stateless)

    @property
    def is_whole(self) -> bool:
        """Says whether all of the vector is exchanged as it is, which density 1 means in any scheme."""
        return self.density == 1.0 and not self.lossless

    def whole(self) -> Scheme[State]:
        """Returns this scheme for one exchange of all of the vector, as it is."""
        return self if self.lossless else replace(self, density=1.0)

    def at_bits(self, bits: float, world: int, sizes: Sequence[Sequence[int]]) -> Scheme[State]:
        """Returns this scheme as it spends so many bits a parameter, of units of tensors of these sizes."""
        raise ConfigError(f"{type(self).__name__} has a density, and no budget in bits")

    @abstractmethod
    def begin(self, n: int, world: int, previous: State | None = None) -> State:
        """Returns the state of a bucket of n elements before its first step.

        `previous` is a state of the layout before (DDP rebuilt its buckets, the world size changed): what
        holds for the whole model, such as a threshold, is kept.
        """

    def init_state(self, sizes: Sequence[int], world: int, previous: State | None = None) -> State:
        """Does what `begin` does for a unit made of tensors of these sizes; most schemes see one vector."""
        return self.begin(sum(sizes), world, previous)

    @abstractmethod
    def step(self, acc: Tensor, state: State, ctx: Ctx) -> Program[Outcome[State]]:
        """Exchanges a bucket once. `acc` and `state` are only read."""

    def next_states(self, states: Sequence[State]) -> list[State]:
        """Returns the states for the next step, given those of all buckets: what holds for the whole model is
        decided here."""
        return list(states)

    def report(self, state: State) -> Mapping[str, float]:
        """Figures worth watching, where a scheme has them:

        threshold   above which elements are sent
        imbalance   the papers' f(t): the longest selection over the mean, before anything is cut
        demand      elements selected by all ranks, before anything is cut
        cut         share of the ranks that could not send all they selected

        and such as only one scheme has. docs/recording.md names all.
        """
        return {}

    def k(self, n: int) -> int:
        return target_count(self.density, n)

    def exchange(self, acc: Tensor | Vector, state: State, ctx: Ctx) -> Program[Outcome[State]]:
        """Runs a step, dense where the density is 1. All drivers enter here."""
        if self.reads_parts and not self.is_whole:
            return (yield from self.step(acc, state, ctx))  # type: ignore[arg-type]  # it takes both
        vector = acc if isinstance(acc, Tensor) else acc.between(0, acc.numel())
        if not self.is_whole:
            return (yield from self.step(vector, state, ctx))
        total = yield AllReduce(vector.clone())
        return Outcome(Sparse.full(total), Sparse.full(vector), state)


# -- sums at places that all ranks know --------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Agreed(Scheme[State]):
    """A scheme in which all ranks know the places before any value travels."""

    # How values travel. The rank that rounds keeps the rounding error, so that nothing is lost.
    values: Values = "exact"


def sum_agreed(mine: Tensor, values: Values, ctx: Ctx) -> Program[tuple[Tensor, Tensor]]:
    """Returns the sum over ranks, and what this rank gave to it. `mine` is handed over."""
    total, given = yield from sum_between(mine, 0, mine.numel(), values, ctx)
    return gathered(total), gathered(given, mine)


def sum_between(
    acc: Tensor | Vector, start: int, stop: int, values: Values, ctx: Ctx, layout: Layout | None = None
) -> Program[tuple[Tensor | Stream, Tensor | Stream]]:
    """Sums some elements of a vector that need not be in memory; nor need what is returned. With the vector's
    layout, blocks end with its tensors, and `start` and `stop` are edges of blocks.

    exact    one all-reduce
    others   the vector is dealt out in rows, one an owner. Every rank rounds its values and sends each owner
             its row; the owner adds up what arrives, in rank order, rounds the sum and sends it to all ranks.

    A rank gave what its rounded values say; the owner of a row gave, in addition, what rounding its sum
    added. Owners change from step to step, so that no rank keeps more of the rounding than another.
    """

    def read(first: int, last: int) -> Tensor:
        first, last = start + first, start + last
        return acc[first:last] if isinstance(acc, Tensor) else acc.between(first, last)

    if values == "exact":
        given = acc[start:stop].clone() if isinstance(acc, Tensor) else acc.between(start, stop)
        total = yield AllReduce(given.clone())
        return total, given
    world, turn = ctx.world, ctx.step % ctx.world
    own = (ctx.rank + turn) % world
    if layout is None:
        shape = RowLayout(VALUE_CODECS[values], world, stop - start, acc.dtype, acc.device)
    else:
        shape = row_layout_over(values, world, acc.dtype, acc.device, layout, start, stop)
    rows = shape.encode(read)
    dealt, one_each = rows.roll(-turn, 0), (1,) * world  # row (r + step) mod P is rank r's
    arrived = yield AllToAll(dealt, one_each, one_each, even=True)
    row = shape.add_up(own, arrived)
    sums = (yield AllGather(row)).roll(turn, 0)
    mine = RoundedSum(own, arrived, sums[own])
    return EncodedVector(shape, sums), EncodedVector(shape, rows, mine)
