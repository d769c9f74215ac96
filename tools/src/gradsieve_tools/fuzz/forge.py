"""Files altered with knowledge of what is in them: decimal numbers, names, entries; of any length."""

from __future__ import annotations

import re
from collections.abc import Callable
from random import Random

from gradsieve_tools.fuzz.entry_points.entry_point import EntryPoint
from gradsieve_tools.fuzz.mutate import below, edit, how_many, one_of

_NUMBER = re.compile(rb"\d+")
_STRING = re.compile(rb'"[^"]{1,64}"')
_ENTRY = re.compile(rb'"[^"]*":(\{[^}]*\}|\d+|"[^"]*"),?')
_SPECIAL = (
    *(0, 1, 2, 7, 8, 15, 16, 255, 2**16, 2**31 - 1, 2**31, 2**32, 2**48, 2**48 + 1, 2**53, 2**63 - 1),
    *(2**63, 2**64, 10**15 - 1, 10**15, 10**40),
)
_TYPES = (b"F64", b"F32", b"F16", b"BF16", b"I64", b"I32", b"I16", b"I8", b"U8", b"BOOL", b"F8", b"C64")
_FILLS = (b"[", b"{", b'"', b"9", b" ", b"\0", b"\x01", b"\xff", b"%2F", b"../")
_TEXT = 4096  # bytes at the beginning of a file that edits of text alter
_GROWS = 1 << 12  # most bytes that an edit adds

Edit = Callable[[Random, bytearray, EntryPoint], None]


def altered(source: Random, entry: EntryPoint) -> bytearray:
    """A few edits; then, mostly, the length of a header as it is now, so that more than that is read."""
    content = bytearray(entry.honest[0] if source.random() < 0.9 else one_of(source, entry.honest))
    for _ in range(how_many(source)):
        if len(content) > 16:
            one_of(source, _EDITS)(source, content, entry)
    if source.random() < 0.7:
        _refit(content)
    return content


def _refit(content: bytearray) -> None:
    """The header of a file of tensors ends where its tensors begin; filled up to a multiple of 8."""
    end = content.find(b"}}", 8)
    if content[8:9] != b"{" or end < 0:
        return
    begin = end + 2
    while content[begin : begin + 1] == b" ":
        begin += 1
    short = -begin % 8
    content[begin:begin] = b" " * short
    content[:8] = (begin + short - 8).to_bytes(8, "little")


def _found(source: Random, content: bytearray, kind: re.Pattern[bytes]) -> re.Match[bytes] | None:
    """Return one of its kind, from some place in the text on."""
    return kind.search(content, below(source, min(len(content), _TEXT)))


def _bytes(source: Random, content: bytearray, entry: EntryPoint) -> None:
    edit(source, content, entry)


def _number(source: Random, content: bytearray, entry: EntryPoint) -> None:
    found = _found(source, content, _NUMBER)
    if found is None:
        return
    way, now = below(source, 4), int(found[0][:19])
    number = (one_of(source, _SPECIAL), one_of(source, entry.edges), now, now)[way]
    number += below(source, 5) - 2 if way != 2 else one_of(source, (now, 4, 8, -4))
    content[found.start() : found.end()] = str(max(number, 0)).encode()


def _type(source: Random, content: bytearray, entry: EntryPoint) -> None:
    place = content.find(one_of(source, _TYPES[:10]) + b'"', below(source, min(len(content), _TEXT)))
    if place > 0:
        stop = content.find(b'"', place)
        content[place:stop] = one_of(source, _TYPES)


def _rename(source: Random, content: bytearray, entry: EntryPoint) -> None:
    """A name, or any other text, as another one is."""
    one, other = _found(source, content, _STRING), _found(source, content, _STRING)
    if one is not None and other is not None:
        content[one.start() : one.end()] = other[0]


def _entry(source: Random, content: bytearray, entry: EntryPoint) -> None:
    """An entry of the header goes, or comes a second time."""
    found = _found(source, content, _ENTRY)
    if found is not None and len(found[0]) < _GROWS:
        again = found[0] * 2 if source.random() < 0.5 else b""
        content[found.start() : found.end()] = again


def _end(source: Random, content: bytearray, entry: EntryPoint) -> None:
    """It ends too soon, or too late."""
    if source.random() < 0.6:
        del content[below(source, len(content)) :]
    else:
        content.extend(one_of(source, _FILLS) * (1 + below(source, 64)))


def _hole(source: Random, content: bytearray, entry: EntryPoint) -> None:
    start = below(source, len(content))
    del content[start : start + 1 + below(source, 64)]


def _fill(source: Random, content: bytearray, entry: EntryPoint) -> None:
    """Much of the same, in the place of what was there or before it: text that nests, names that climb."""
    start, what = below(source, len(content)), one_of(source, _FILLS)
    what *= 1 + below(source, 1 << below(source, 12))
    stop = start if source.random() < 0.5 else start + len(what)
    content[start:stop] = what[:_GROWS]


def _splice(source: Random, content: bytearray, entry: EntryPoint) -> None:
    """Part of another rank's file."""
    lent, start = one_of(source, entry.honest), below(source, len(content))
    stop = start + 1 + below(source, 256)
    content[start:stop] = lent[start:stop]


_EDITS: tuple[Edit, ...] = (
    *(_bytes, _bytes, _bytes, _number, _number, _number),
    *(_type, _rename, _entry, _end, _hole, _fill, _splice),
)
