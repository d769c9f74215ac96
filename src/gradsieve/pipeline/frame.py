"""One unit's exchange: the scheme's program, whose first all-reduce takes the ranks' message along.

    message   what is to be summed besides (probes, small tensors, votes), what each rank is doing
              (`tags.py`), and two words of a checksum

The checksum says whether what ranks sent is what arrived. Every rank adds up a hash of each message that it
sends, and takes off that of each one it receives. If none was changed on its way, the sum over all ranks is
0. It is formed in 24 bits, sent as two numbers below 4,096: exact in float32 for up to 4,096 ranks, with no
round and no copy of a payload more. All ranks see the same sum, so that all raise in the same exchange,
before anything of it is applied.

Damage stays unseen with a chance of one in 16 million. Messages after the all-reduce that carries the words
are covered by the next exchange, which is also what `save()` begins with. Not seen: what the backend adds up
itself (`AllReduce`), messages of one op that changed places, and lies: a peer can send what hash it likes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Generic, NamedTuple, TypeAlias

import torch
from torch import Tensor

from gradsieve.comm.ops import AllGather, AllReduce, AllToAll, Broadcast, Exchange, Meter, Op
from gradsieve.errors import Malformed
from gradsieve.types import Program, Result

CHECKSUM_WORDS = 2
_HALF = 12  # bits of the checksum in each of its words
_BITS = 2 * _HALF
_ODD = 0x2545F4914F6CDD1D  # the top bits of a product with it depend on all bits of what is multiplied
_PIECE, _LARGE_PIECE = 1 << 14, 1 << 20  # numbers that are hashed at once, on a CPU and elsewhere
Factors: TypeAlias = Callable[[int, int, torch.device], Tensor]
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Span(NamedTuple):
    name: str
    unit: int  # that was exchanged; -1 for the step as a whole
    start: float  # in seconds, by time.perf_counter()
    stop: float


@dataclass(slots=True)
class Timeline:
    """The spans of one step's stages on one rank; none lies inside another."""

    spans: list[Span] = field(default_factory=list)

    @contextmanager
    def stage(self, name: str, unit: int = -1) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, unit, start)

    def add(self, name: str, unit: int, start: float) -> None:
        """Add the span from `start` to now."""
        self.spans.append(Span(name, unit, start, time.perf_counter()))

    def seconds(self) -> dict[str, float]:
        """Return the sum of all spans of a stage, by stage."""
        total: dict[str, float] = {}
        for span in self.spans:
            total[span.name] = total.get(span.name, 0.0) + span.stop - span.start
        return total


class Frame(Generic[Result]):
    """Ranks agree on which op takes the message along, since they agree on the program's ops; where none
    can, an all-reduce of its own follows."""

    def __init__(
        self,
        program: Program[Result],
        message: Tensor,
        checksum: Checksum,
        meter: Meter,
        timeline: Timeline,
        unit: int = 0,
    ) -> None:
        """The last elements of `message` are the checksum's: they are written when it is sent."""
        self.program, self.message, self.checksum = program, message, checksum
        self.meter, self.timeline, self.unit = meter, timeline, unit

    def run(self) -> Program[tuple[Result, Tensor]]:
        """Returns what the program does, and the sum of all ranks' messages."""
        reply: Any = None
        sums: Tensor | None = None
        while True:
            with self.timeline.stage("select", self.unit):
                try:
                    op = self.program.send(reply)
                except StopIteration as end:
                    result: Result = end.value
                    break
            if sums is None and isinstance(op, AllReduce) and op.tensor.dtype == self.message.dtype:
                own, shape = op.tensor.numel(), op.tensor.shape
                both = yield from self._ask(AllReduce(torch.cat([op.tensor.flatten(), self._signed()])))
                reply, sums = both[:own].view(shape), both[own:]
            else:
                reply = yield from self._ask(op)
        if sums is None:
            sums = yield from self._ask(AllReduce(self._signed()))
        return result, sums

    def _signed(self) -> Tensor:
        self.message[-CHECKSUM_WORDS:] = self.checksum.words(self.message)
        return self.message

    def _ask(self, op: Op) -> Program[Tensor]:
        sent = self.checksum.of_sent(op)  # before an engine may overwrite it
        self.meter.count(op)
        start = time.perf_counter()
        reply: Tensor = yield op
        self.timeline.add("exchange", self.unit, start)
        self.checksum.add(sent, op, reply)
        return reply


class Checksum:
    """A hash of what one rank sent, less that of what it received, since the words were last sent."""

    def __init__(self, rank: int, world: int) -> None:
        self._rank, self._world = rank, world
        self._total: Tensor | int = 0  # on the device of what is sent: the host does not wait for it
        # Messages are as long in every step. Not of all ranks in a process: streams differ.
        self._factors = lru_cache(maxsize=16)(odd_numbers)

    def words(self, like: Tensor) -> Tensor:
        total, self._total = torch.as_tensor(self._total, dtype=torch.int64, device=like.device), 0
        return torch.stack([total % (1 << _HALF), (total >> _HALF) % (1 << _HALF)]).to(like.dtype)

    def of_sent(self, op: Op) -> Tensor | int:
        is_silent = self._world == 1 or (isinstance(op, Broadcast) and op.root != self._rank)
        if is_silent or isinstance(op, AllReduce):
            return 0
        copies = self._world if isinstance(op, AllGather | Broadcast) else 1
        return copies * message_hash(op.tensor, _row_bytes(op), self._factors)

    def add(self, sent: Tensor | int, op: Op, reply: Tensor) -> None:
        if self._world > 1 and not isinstance(op, AllReduce):
            self._total = self._total + sent - message_hash(reply, _row_bytes(op), self._factors)

    def check(self, sums: Sequence[float], step: int) -> None:
        """Raises unless the sums of all ranks' words say that everything arrived as it was sent."""
        if self._world > 1 and (int(sums[0]) + (int(sums[1]) << _HALF)) % (1 << _BITS):
            raise Malformed(
                f"rank {self._rank}, step {step}: what arrived at some rank is not what was sent to it: a "
                "message was damaged on its way, in this exchange or behind the one before. Nothing of this "
                "one was applied: start again from a checkpoint; if it happens again, look at memory and "
                "network"
            )


def sums_within(sums: Sequence[float], what: str) -> None:
    """Checks that each is the sum of finite numbers from 0 up, one a rank."""
    for total in sums:
        if not 0.0 <= total < math.inf:
            raise Malformed(f"{what} add up to {total} over all ranks: some rank sent NaN, inf or a negative")


def _row_bytes(op: Op) -> int:
    """The size of the largest part that is a part on both sides."""
    size = op.tensor.element_size()
    match op:
        case AllGather() | Broadcast() | AllReduce():
            return op.tensor.numel() * size
        case AllToAll():
            return math.prod(op.tensor.shape[1:]) * size
        case Exchange():
            return size


def odd_numbers(start: int, stop: int, device: torch.device) -> Tensor:
    """Return the factors of the numbers at these places of a row."""
    return torch.arange(2 * start + 1, 2 * stop, 2, dtype=torch.int64, device=device) * _ODD


def message_hash(tensor: Tensor, row: int, factors: Factors = odd_numbers) -> Tensor | int:
    """The sum of its rows' hashes, of so many bytes each; places in a row count."""
    if not tensor.numel():
        return 0
    octets = tensor.detach().contiguous().view(-1).view(torch.uint8).view(-1, row)
    width = next(each for each in _INTEGERS if each >= min(row, 8))
    if row % width:
        octets = torch.nn.functional.pad(octets, (0, -row % width))
    elif octets.storage_offset() % width:
        octets = octets.clone()
    return _hash(octets.view(_INTEGERS[width]), factors)


def _hash(numbers: Tensor, factors: Factors) -> Tensor:
    """Piece by piece: what is formed on the way stays in a processor's cache, or is little memory."""
    rows, columns = numbers.shape
    piece = _PIECE if numbers.is_cpu else _LARGE_PIECE
    wide = min(columns, piece)
    found = []
    for left in range(0, columns, wide):
        right = min(left + wide, columns)
        odd = factors(left, right, numbers.device)
        for top in range(0, rows, piece // wide):
            some = numbers[top : top + piece // wide, left:right].to(torch.int64)
            # A shift that keeps the sign: what is added up is the product's top bits all the same.
            found.append(((some + 1) * odd).bitwise_right_shift_(64 - _BITS).sum())
    return found[0] if len(found) == 1 else torch.stack(found).sum()
