"""The vocabulary of communication: what a scheme may ask for.

A scheme yields one of these and is sent the reply, a tensor whose shape is known before the op is issued
(sizes first: no engine ever has to guess a length, and none is trusted from the wire).

The tensor in an op is handed over: an engine may overwrite it. Replies may be shared; read them only.
"""

from __future__ import annotations

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

    The reply holds `receive_counts[j]` rows from rank j, in rank order.
    """

    tensor: Tensor
    send_counts: tuple[int, ...]
    receive_counts: tuple[int, ...]
    even: bool = False
    """Every count of every rank is the same. Who asks has to say so: a rank sees only its own."""


@dataclass(frozen=True, slots=True, eq=False)
class Exchange:
    """One message to rank `to` and one of `receive` elements from rank `source`, at the same time."""

    tensor: Tensor
    to: int
    source: int
    receive: int
    within: str = ""
    """The collective that it is a round of, in words."""


@dataclass(frozen=True, slots=True, eq=False)
class Broadcast:
    """The root's tensor on every rank. Other ranks hand in a tensor of the same shape."""

    tensor: Tensor
    root: int


IN_FLIGHT = 4
"""Messages of an uneven all-to-all on their way at once."""

Op: TypeAlias = AllGather | AllReduce | AllToAll | Exchange | Broadcast


def describe(op: Op) -> str:
    """What must agree between ranks, in words for an error message."""
    kind = type(op).__name__
    dtype = str(op.tensor.dtype).removeprefix("torch.")
    match op:
        case AllGather() | AllReduce():
            return f"{kind} of {dtype} {tuple(op.tensor.shape)}"
        case Broadcast():
            return f"{kind} of {dtype} {tuple(op.tensor.shape)} from rank {op.root}"
        case AllToAll():
            return f"{kind} of {dtype}, even {tuple(op.tensor.shape)}" if op.even else f"{kind} of {dtype}"
        case Exchange():  # sizes differ between ranks by nature
            return f"{kind} of {dtype} within {op.within}" if op.within else f"{kind} of {dtype}"
