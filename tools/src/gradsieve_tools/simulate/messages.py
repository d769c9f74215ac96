"""Which messages an op becomes: rounds of them, by the algorithm that carries it.

    op          ring (gloo's own)                             log (Bruck et al., 1997)
    AllGather   P - 1 rounds, own bytes to the next rank      L rounds, what is held to the rank 2^i before
    AllReduce   2 (P - 1) rounds, a P-th to the next rank     2 L rounds: the same backwards, then forwards
    AllToAll    to the ranks 1 to P - 1 further, a few at     L rounds, the rows that have bit i of their way
                a time, each its row                          to go; equal rows only
    Broadcast   L rounds, a tree with its root at the root
    Exchange    1 round, as it is

L = ceil(log2 P). Where both ways exist, `log` takes the one that an idle network without a bottleneck would
carry faster. Messages of a round are in flight at the same time; the next round begins when all of them have
arrived. gloo keeps two halves of a ring's message in flight and so hides up to a third of a round: its rings
are never slower than these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gradsieve.comm import ops
from gradsieve.schemes import AllGather, AllReduce, AllToAll, Broadcast, Exchange, Op

Collectives = Literal["ring", "log"]
Ranks: TypeAlias = NDArray[np.int64]
Sizes: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Call:
    kind: str
    sizes: Sizes  # bytes each rank hands over; for an all-to-all a row a sender, a column a receiver
    to: Ranks | None = None  # receivers of an exchange
    root: int = 0

    @property
    def world(self) -> int:
        return len(self.sizes)

    @property
    def mean(self) -> float:
        """Bytes that a rank hands over."""
        return float(self.sizes.sum()) / self.world

    def scaled(self, factor: float) -> Call:
        return replace(self, sizes=self.sizes * factor)


@dataclass(frozen=True, slots=True)
class Round:
    """Messages that are in flight at the same time, and as many such rounds one after the other."""

    sources: Ranks
    targets: Ranks
    sizes: Sizes
    times: int = 1
    alike: bool = False  # stands for many that differ only in who talks to whom

    @property
    def most_messages(self) -> int:
        return int(np.bincount(self.sources).max()) if self.sources.size else 0

    @property
    def most_bytes(self) -> float:
        return float(np.bincount(self.sources, self.sizes).max()) if self.sources.size else 0.0


@dataclass(frozen=True, slots=True)
class Price:
    message: float  # seconds, however short
    byte: float  # seconds for one more

    def of(self, rounds: Sequence[Round]) -> float:
        each = (self.message * one.most_messages + self.byte * one.most_bytes for one in rounds)
        return sum(one.times * seconds for one, seconds in zip(rounds, each, strict=True))


def call_of(ops: Sequence[Op]) -> Call:
    """Return what all ranks asked for; ops are of one kind, as `lockstep` has seen to it."""
    first = ops[0]
    if isinstance(first, AllToAll):
        row = first.tensor[:1].numel() * first.tensor.element_size() if first.tensor.numel() else 0
        counts = [op.send_counts for op in ops if isinstance(op, AllToAll)]
        return Call("AllToAll", np.array(counts, dtype=np.float64) * row)
    sizes = np.array([op.tensor.numel() * op.tensor.element_size() for op in ops], dtype=np.float64)
    if isinstance(first, Exchange):
        targets = np.array([op.to for op in ops if isinstance(op, Exchange)], dtype=np.int64)
        return Call("Exchange", sizes, to=targets)
    root = first.root if isinstance(first, Broadcast) else 0
    return Call(type(first).__name__, sizes, root=root)


def rounds_of(call: Call, collectives: Collectives, price: Price) -> list[Round]:
    """The messages of a call, round by round."""
    usual = _USUAL[call.kind](call)
    if collectives == "ring" or call.kind not in _IN_LOG:
        return usual
    if call.kind == "AllToAll" and np.ptp(call.sizes):
        return usual
    return min(_IN_LOG[call.kind](call), usual, key=price.of)


def _to_rank(call: Call, hop: int, sizes: Any, times: int = 1) -> Round:
    ranks = np.arange(call.world)
    return _sent(ranks, (ranks + hop) % call.world, np.broadcast_to(sizes, ranks.shape), times)


def _sent(sources: Ranks, targets: Ranks, sizes: Sizes, times: int = 1) -> Round:
    real = (sources != targets) & (sizes > 0)
    return Round(sources[real], targets[real], np.asarray(sizes)[real], times)


def _ring_gather(call: Call) -> list[Round]:
    return [_to_rank(call, 1, call.sizes, call.world - 1)] if call.world > 1 else []


def _ring_reduce(call: Call) -> list[Round]:
    return [_to_rank(call, -1, call.sizes / call.world, 2 * (call.world - 1))] if call.world > 1 else []


def _direct(call: Call) -> list[Round]:
    ranks, rounds = np.arange(call.world), []
    for first in range(1, call.world, ops.IN_FLIGHT):
        shifts = np.arange(first, min(first + ops.IN_FLIGHT, call.world))
        sources = np.tile(ranks, len(shifts))
        targets = (sources + shifts.repeat(call.world)) % call.world
        one = _sent(sources, targets, call.sizes[sources, targets])
        rounds.append(replace(one, alike=True))
    return rounds


def _tree(call: Call) -> list[Round]:
    """Places count from the root; those that have it send it to those 2^i further."""
    rounds = []
    for power in range((call.world - 1).bit_length()):
        places = np.arange(min(1 << power, call.world - (1 << power)))
        sources, targets = ((places + hop + call.root) % call.world for hop in (0, 1 << power))
        rounds.append(_sent(sources, targets, call.sizes[sources]))
    return rounds


def _as_it_is(call: Call) -> list[Round]:
    assert call.to is not None
    return [_sent(np.arange(call.world), call.to, call.sizes)]


def _doubling(world: int) -> list[tuple[int, int]]:
    """Return what is held before a round, and what the round adds to it."""
    return [(1 << power, min(1 << power, world - (1 << power))) for power in range((world - 1).bit_length())]


def _log_gather(call: Call) -> list[Round]:
    return [_to_rank(call, -held, more * call.sizes) for held, more in _doubling(call.world)]


def _log_reduce(call: Call) -> list[Round]:
    part = call.scaled(1 / call.world)
    back = [_to_rank(part, held, more * part.sizes) for held, more in reversed(_doubling(call.world))]
    return back + _log_gather(part)


def _log_all_to_all(call: Call) -> list[Round]:
    far, hops = np.arange(call.world), [1 << power for power in range((call.world - 1).bit_length())]
    return [_to_rank(call, hop, np.count_nonzero(far & hop) * call.sizes[0, 0]) for hop in hops]


_USUAL = {
    AllGather.__name__: _ring_gather,
    AllReduce.__name__: _ring_reduce,
    AllToAll.__name__: _direct,
    Broadcast.__name__: _tree,
    Exchange.__name__: _as_it_is,
}
_IN_LOG = {
    AllGather.__name__: _log_gather,
    AllReduce.__name__: _log_reduce,
    AllToAll.__name__: _log_all_to_all,
}
