"""Messages altered with knowledge of what is in them: numbers of four and eight bytes, floats, rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import TypeVar

from gradsieve_tools.fuzz.entry_points.entry_point import EntryPoint

_SPECIAL = (
    *(0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1),
    *(-1, -2, -(2**31), -(2**63)),
    *(0x7F800000, 0xFF800000, 0x7FC00000, 0x7F7FFFFF, 0xFF7FFFFF, 0x80000000, 0x00000001, 0x3F800000),
    *(0x7FF0 << 48, 0xFFF0 << 48, 0x7FF8 << 48, 0x7FEF << 48),
)
_HEAD = 16  # bytes at the beginning that hold headers and counts

Edit = Callable[[Random, bytearray, EntryPoint], None]
Thing = TypeVar("Thing")


def mutant(source: Random, entry: EntryPoint) -> bytearray:
    """A message of the same length: the receiver has said how long it is, before any byte came."""
    way = source.random()
    if way < 0.03:
        return bytearray(source.randbytes(len(entry.honest[0])))
    frame = bytearray(entry.honest[0] if way < 0.9 else _of_same_length(source, entry))
    for _ in range(how_many(source)):
        edit(source, frame, entry)
    return frame


def edit(source: Random, frame: bytearray, entry: EntryPoint) -> None:
    one_of(source, _EDITS)(source, frame, entry)


def how_many(source: Random) -> int:
    """Edits of a message: mostly one, so that what it does is not hidden by what another does."""
    return 1 if source.random() < 0.75 else 2 + below(source, 4)


def below(source: Random, stop: int) -> int:
    """A number from 0 up to `stop`, in a fifth of the time that `randrange` takes."""
    return int(source.random() * stop)


def one_of(source: Random, things: Sequence[Thing]) -> Thing:
    return things[int(source.random() * len(things))]


def _of_same_length(source: Random, entry: EntryPoint) -> bytes:
    other = one_of(source, entry.honest)
    return other if len(other) == len(entry.honest[0]) else entry.honest[0]


def _place(source: Random, frame: Sequence[int], width: int = 1) -> int:
    end = len(frame) - width
    if end <= 0:
        return 0
    if end > _HEAD and source.random() < 0.25:
        end = _HEAD
    place = int(source.random() * (end + 1))
    return place if width == 1 else place & ~3


def _write(frame: bytearray, place: int, width: int, number: int) -> None:
    if place + width <= len(frame):
        frame[place : place + width] = (number % (1 << 8 * width)).to_bytes(width, "little")


def _read(frame: bytearray, place: int, width: int) -> int:
    return int.from_bytes(frame[place : place + width], "little")


def _width(source: Random) -> int:
    return 8 if source.random() < 0.25 else 4


def _flip(source: Random, frame: bytearray, entry: EntryPoint) -> None:
    frame[_place(source, frame)] ^= 1 << source.getrandbits(3)


def _byte(source: Random, frame: bytearray, entry: EntryPoint) -> None:
    frame[_place(source, frame)] = source.getrandbits(8)


def _number(source: Random, frame: bytearray, entry: EntryPoint) -> None:
    width = _width(source)
    number = one_of(source, _SPECIAL)
    if entry.edges and source.random() < 0.5:
        number = one_of(source, entry.edges) + below(source, 5) - 2
    _write(frame, _place(source, frame, width), width, number)


def _noise(source: Random, frame: bytearray, entry: EntryPoint) -> None:
    width = _width(source)
    _write(frame, _place(source, frame, width), width, source.getrandbits(8 * width))


def _beside(source: Random, frame: bytearray, entry: EntryPoint) -> None:
    """A number a little larger or smaller: an index that its neighbour has already."""
    width = _width(source)
    place = _place(source, frame, width)
    _write(frame, place, width, _read(frame, place, width) + one_of(source, (-2, -1, 1, 2)))


def _swap(source: Random, frame: bytearray, entry: EntryPoint) -> None:
    width = _width(source)
    one, other = _place(source, frame, width), _place(source, frame, width)
    first, second = _read(frame, one, width), _read(frame, other, width)
    _write(frame, one, width, second)
    _write(frame, other, width, first)


def _copy(source: Random, frame: bytearray, entry: EntryPoint) -> None:
    width = _width(source)
    number = _read(frame, _place(source, frame, width), width)
    _write(frame, _place(source, frame, width), width, number)


def _stretch(source: Random, frame: bytearray) -> slice:
    start = _place(source, frame)
    return slice(start, min(len(frame), start + 1 + below(source, 1 + len(frame) // 2)))


def _fill(source: Random, frame: bytearray, entry: EntryPoint) -> None:
    here = _stretch(source, frame)
    frame[here] = one_of(source, (b"\x00", b"\xff")) * (here.stop - here.start)


def _splice(source: Random, frame: bytearray, entry: EntryPoint) -> None:
    here = _stretch(source, frame)
    lent = one_of(source, entry.honest)[here]
    frame[here.start : here.start + len(lent)] = lent


def _shift(source: Random, frame: bytearray, entry: EntryPoint) -> None:
    place, length = _place(source, frame, 4), len(frame)
    frame[place:place] = frame[place : place + 4]
    del frame[length:]


_EDITS: tuple[Edit, ...] = (
    *(_flip, _byte, _number, _number, _noise, _beside),
    *(_swap, _copy, _fill, _splice, _shift),
)
