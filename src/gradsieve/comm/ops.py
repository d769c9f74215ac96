"""The five ops that a scheme may ask for, and the cost of each.

A scheme yields an op and is sent the reply, a tensor whose shape is known before the op is issued: sizes are
exchanged first, no engine has to guess a length, and none is trusted from the wire. The tensor in an op is
handed over: an engine may overwrite it. Replies may be shared; read them only.

`Meter` counts by the best known algorithm for each op, whatever carries it: gloo's rings take P - 1 rounds,
for as many bytes. The lab's interface counters (`gradsieve bench step`) give the bytes that left the host.

    op          bytes sent = received             rounds
    AllGather   (P-1) b            b = own bytes  ceil(log2 P)      Bruck
    AllReduce   2 b (P-1)/P                       2 ceil(log2 P)    Rabenseifner
    Broadcast   b received; the root sends        ceil(log2 P)      binomial tree
                b ceil(log2 P), others forward
    AllToAll    bytes to and from other ranks     P - 1             direct
    Exchange    as given                          1
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class AllGather:
    """Every rank's tensor, stacked in rank order: reply shape (P, *tensor.shape)."""

    tensor: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class AllReduce:
    """The sum over ranks, the same bits on every rank."""

    tensor: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class AllToAll:
    """Rows of `tensor` to every rank, `send_counts[j]` of them to rank j, concatenated in rank order.

    The reply holds `receive_counts[j]` rows from rank j, in rank order. `even` says that all counts of all
    ranks are the same, which one rank cannot see.
    """

    tensor: Tensor
    send_counts: tuple[int, ...]
    receive_counts: tuple[int, ...]
    even: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Exchange:
    """One message to rank `to` and one of `receive` elements from rank `source`, at the same time."""

    tensor: Tensor
    to: int
    source: int
    receive: int


@dataclass(frozen=True, slots=True, eq=False)
class Broadcast:
    """The root's tensor on every rank. Other ranks hand in a tensor of the same shape."""

    tensor: Tensor
    root: int


Op: TypeAlias = AllGather | AllReduce | AllToAll | Exchange | Broadcast
FEW = 2  # ranks up to which collectives stay the backend's: a ring of two has nothing to gain
IN_FLIGHT = 4  # messages of an uneven all-to-all that are sent at once


def describe(op: Op) -> str:
    """Return what must agree between ranks, in words for an error message."""
    kind = f"{type(op).__name__} of {str(op.tensor.dtype).removeprefix('torch.')}"
    match op:
        case AllGather() | AllReduce():
            return f"{kind} {tuple(op.tensor.shape)}"
        case Broadcast():
            return f"{kind} {tuple(op.tensor.shape)} from rank {op.root}"
        case AllToAll():
            return f"{kind}, even {tuple(op.tensor.shape)}" if op.even else kind
        case Exchange():  # sizes differ between ranks by nature
            return kind


@dataclass(slots=True)
class Meter:
    """Counts the bytes that one rank has sent and received, and the rounds that took."""

    rank: int
    world: int
    sent: float = 0.0
    received: float = 0.0
    moved: float = 0.0  # sent or received, whichever is more in each op: links carry both at once
    rounds: int = 0
    collectives: int = 0

    def count(self, op: Op) -> None:
        sent, received, rounds = self._cost(op)
        self.sent += sent
        self.received += received
        self.moved += max(sent, received)
        self.rounds += rounds
        self.collectives += 1

    def _cost(self, op: Op) -> tuple[float, float, int]:
        others = self.world - 1
        log = others.bit_length()  # ceil(log2 P)
        size = op.tensor.element_size()
        own = op.tensor.numel() * size
        match op:
            case AllGather():
                return own * others, own * others, log
            case AllReduce():
                moved = 2.0 * own * others / self.world
                return moved, moved, 2 * log
            case Broadcast():
                place = (self.rank - op.root) % self.world
                return own * self._children(place), own * (place > 0), log
            case AllToAll():
                row = math.prod(op.tensor.shape[1:]) * size
                sent = sum(op.send_counts) - op.send_counts[self.rank]
                received = sum(op.receive_counts) - op.receive_counts[self.rank]
                return sent * row, received * row, others
            case Exchange():
                return (own, op.receive * size, 1) if op.to != self.rank else (0.0, 0.0, 0)

    def _children(self, place: int) -> int:
        """Count the children of a node of a binomial tree: a parent lacks its child's lowest bit."""
        bits = (place & -place).bit_length() - 1 if place else self.world.bit_length()
        return sum(place + (1 << bit) < self.world for bit in range(bits))
