"""Whether what ranks sent is what arrived: two words that are piggybacked on every exchange.

Every rank adds up a hash of each message that it sends, and takes off that of each one it receives. If none
was changed on its way, the sum over all ranks is 0. It is formed in 24 bits, sent as two numbers below 4,096
in the all-reduce that takes place anyway: exact in float32 for up to 4,096 ranks, with no round and no copy
of a payload more. All ranks see the same sum, so that all raise in the same exchange, before anything of it
is applied.

Damage stays unseen with a chance of one in 16 million. Messages after the all-reduce that carries the words
are covered by the next exchange, which is also what `save()` begins with.

Not seen: what the backend adds up itself (`AllReduce`), messages of one op that changed places, and lies:
this is against accidents, a peer can send whatever hash it likes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TypeAlias

import torch
from torch import Tensor

from gradsieve.comm.ops import AllGather, AllReduce, AllToAll, Broadcast, Exchange, Op
from gradsieve.errors import Malformed
from gradsieve.types import Program, Result, by_way_of

WORDS = 2
_HALF = 12
_BITS = 2 * _HALF
_ODD = 0x2545F4914F6CDD1D
"""The top bits of a product with it depend on all bits of what is multiplied."""
_PIECE, _LARGE_PIECE = 1 << 14, 1 << 20
"""Numbers that are hashed at once, on a CPU and elsewhere."""
Factors: TypeAlias = Callable[[int, int, torch.device], Tensor]
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Checksum:
    """One rank's."""

    def __init__(self, rank: int, world: int) -> None:
        self._rank, self._world = rank, world
        self._total: Tensor | int = 0
        """Of messages since the words were last sent. On their device: the host does not wait for it."""
        self._factors = lru_cache(maxsize=16)(odd_numbers)
        """Messages are as long in every step. Not of all ranks in a process: streams differ."""

    def watched(self, program: Program[Result], dtype: torch.dtype) -> Program[Result]:
        """`program`, whose first all-reduce of this type has two spare elements for the words at its end."""
        if self._world == 1:
            return program
        is_sent = False

        def perform(op: Op) -> Program[Tensor]:
            nonlocal is_sent
            if isinstance(op, AllReduce):
                if not is_sent and op.tensor.dtype == dtype:
                    self._tell(op.tensor)
                    is_sent = True
                return (yield op)
            sent = self._sent(op)  # before an engine may overwrite it
            reply: Tensor = yield op
            self._total = self._total + sent - message_hash(reply, _row_bytes(op), self._factors)
            return reply

        return by_way_of(program, perform)

    def check(self, sums: Sequence[float], step: int) -> None:
        """Of all ranks' words."""
        if self._world > 1 and (int(sums[0]) + (int(sums[1]) << _HALF)) % (1 << _BITS):
            raise Malformed(
                f"rank {self._rank}, step {step}: what arrived at some rank is not what was sent to it: a "
                "message was damaged on its way, in this exchange or behind the one before. Nothing of this "
                "one was applied: start again from a checkpoint; if it happens again, look at memory and "
                "network"
            )

    def _tell(self, tensor: Tensor) -> None:
        flat = tensor.view(-1)
        flat[-2] = self._total % (1 << _HALF)
        flat[-1] = (self._total >> _HALF) % (1 << _HALF)
        self._total = 0

    def _sent(self, op: Op) -> Tensor | int:
        if isinstance(op, Broadcast) and op.root != self._rank:
            return 0
        copies = self._world if isinstance(op, AllGather | Broadcast) else 1
        return copies * message_hash(op.tensor, _row_bytes(op), self._factors)


def _row_bytes(op: Op) -> int:
    """Of the largest part that is a part on both sides."""
    size = op.tensor.element_size()
    match op:
        case AllGather() | Broadcast() | AllReduce():
            return op.tensor.numel() * size
        case AllToAll():
            return math.prod(op.tensor.shape[1:]) * size
        case Exchange():
            return size


def odd_numbers(start: int, stop: int, device: torch.device) -> Tensor:
    """By place in a row, what the number there is multiplied with."""
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
