"""Counts bytes and rounds for one rank, by the cost of the best known algorithm for each op.

    op          bytes sent = received             rounds
    AllGather   (P-1) b            b = own bytes  ceil(log2 P)      Bruck
    AllReduce   2 b (P-1)/P                       2 ceil(log2 P)    Rabenseifner
    Broadcast   b received; the root sends        ceil(log2 P)      binomial tree
                b ceil(log2 P), others forward
    AllToAll    bytes to and from other ranks     P - 1             direct
    Exchange    as given                          1

What an engine's own algorithm does can differ in rounds (gloo's rings take P-1); bytes agree. The lab's
interface counters (`gradsieve bench step`) give the bytes that really left the host.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gradsieve.comm.ops import AllGather, AllReduce, AllToAll, Broadcast, Exchange, Op


@dataclass(slots=True)
class Meter:
    rank: int
    world: int
    sent: float = 0.0
    received: float = 0.0
    moved: float = 0.0
    """Bytes sent or received, whichever is more, of one op after the other: links carry both at once."""
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
        """Of a node of the binomial tree in which the parent of a place has its lowest set bit cleared."""
        bits = (place & -place).bit_length() - 1 if place else self.world.bit_length()
        return sum(place + (1 << bit) < self.world for bit in range(bits))
