"""Records of trainings, read: the lives of a training as one, over all files that it was divided into.

What is read is checked: version, fields, their types, ranges and order. A line that was not finished, since
the disk was full or the process killed, ends its life and nothing else. `Tail` reads a file that is still
written.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from gradsieve import record_file
from gradsieve.errors import Malformed, printable
from gradsieve.record_file import LONGEST, MARK, MAY_DIFFER, SUFFIX, VERSION, path_of

__all__ = ["SUFFIX", "Header", "Joined", "Line", "Record", "Tail", "Whole", "path_of", "read", "text_of"]

_log = logging.getLogger("gradsieve")

_MOST_STAGES = 64
_LARGEST = 1 << 53  # up to here a float has every whole number


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    name: str
    scheme: str  # with its settings, as `gradsieve bench` takes it
    exchange: str  # `steps` or `gradients`
    density: float  # the target
    rank: int
    world: int
    parameters: int
    every: int  # steps between two lines with norms
    period: int = 1  # steps of the training for one exchange, and so for one line
    budget: str = ""  # `auto`, or the bits a parameter and step that were given; empty where a density was
    began: str = ""  # start of this run. A header that repeats it continues that run

    @property
    def bytes_a_bit(self) -> float:
        """Moved by a rank in an exchange, for each bit a parameter and step."""
        return self.parameters * self.period / 8


@dataclass(slots=True, kw_only=True)
class Line:
    step: int
    at: float  # seconds since the recording began; in a record that was read, since the first one's
    density: float
    bits: float  # moved by this rank, a parameter
    seconds: Mapping[str, float] = field(default_factory=dict)  # by stage
    threshold: float | None = None
    imbalance: float | None = None  # f(t): the longest selection over the mean, before any row is cut
    cut: float | None = None  # share of the ranks that could not send all they selected
    waiting: float | None = None  # norm of the residual
    age: float | None = None  # steps for which what is sent now was in the residual
    contraction: float | None = None  # |acc - spent|^2 / |acc|^2
    # |top-k of the ranks' mean - update| / |mean of what is new|, if one process has all ranks
    xi: float | None = None
    loss: float | None = None


def text_of(entry: Header | Line) -> str:
    """Return one line of a file, as a recorder writes it."""
    mark = {MARK: VERSION} if isinstance(entry, Header) else {}
    return record_file.text_of(mark | asdict(entry))


def differences(one: Header, other: Header) -> list[str]:
    """Why their lines mean different things, and belong in no common record; nothing if they do not."""
    pairs = [(each.name, getattr(one, each.name), getattr(other, each.name)) for each in fields(Header)]
    return [f"{name} {a}, not {b}" for name, a, b in pairs if name not in MAY_DIFFER and a != b]


def numbered(path: Path) -> list[tuple[int, Path]]:
    """Return files that were moved away from `path`, the oldest first: `path`.1, `path`.2, ..."""
    pattern = re.compile(re.escape(path.name) + r"\.(\d{1,9})")
    try:
        names = os.listdir(path.parent)
    except OSError:
        names = []
    return sorted((int(found[1]), path.with_name(n)) for n in names if (found := pattern.fullmatch(n)))


def pieces(path: Path) -> list[Path]:
    """A file, after those that it goes on from. Such of another training that lie there too are left out."""
    try:
        own, older = header_of(path), []
        for _, piece in reversed(numbered(path)):
            if differences(header_of(piece), own):
                break
            older.append(piece)
    except Malformed:  # who reads the file itself says so
        return [path]
    return [*reversed(older), path]


def header_of(path: Path) -> Header:
    try:
        with path.open("rb") as file:
            return header_in(path, file.readline(LONGEST).decode())
    except (OSError, UnicodeDecodeError) as error:
        raise Malformed(f"{path} cannot be read: {error}") from error


def header_in(path: Path, text: str, place: int = 1) -> Header:
    found = json_in(text)
    version = found.pop(MARK, None)
    if version is None:
        raise Malformed(f"{path} is no record of a training: its first line does not say {MARK}")
    if version != VERSION:
        raise Malformed(f"{path} has version {version!r}, and this gradsieve reads {VERSION}")
    found.setdefault("period", 1)  # files from before it was recorded, or the next one
    found.setdefault("budget", "")
    found.setdefault("began", "")
    return entry_of(Header, found, f"{path}, line {place}")


def json_in(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


Entry = TypeVar("Entry", Header, Line)


_KINDS: dict[type, dict[str, str]] = {
    kind: {each.name: str(each.type) for each in fields(kind)} for kind in (Header, Line)
}


def entry_of(kind: type[Entry], found: dict[str, Any], where: str) -> Entry:
    kinds = _KINDS[kind]
    if found.keys() != kinds.keys():
        wrong = [printable(name[:80]) for name in sorted(set(found) ^ set(kinds))[:6]]
        raise Malformed(f"{where}: not as a record has it, in {', '.join(wrong)}")
    for name, type_ in kinds.items():
        if not (_fits(found[name], type_) and _in_range(name, found[name])):
            raise Malformed(f"{where}: {name} is {printable(repr(found[name])[:80])}")
    if kind is Header and not found["rank"] < found["world"]:
        raise Malformed(f"{where}: rank {found['rank']} of {found['world']}")
    return kind(**found)


def _fits(value: Any, kind: str) -> bool:
    """Return whether a value is what the annotation of its field says."""
    if kind.startswith("Mapping"):
        return isinstance(value, dict) and all(_fits(each, "float") for each in value.values())
    if value is None:
        return kind.endswith("None")
    if kind.startswith("float"):
        whole = type(value) is int and abs(value) <= _LARGEST
        return whole or (type(value) is float and math.isfinite(value))
    return type(value).__name__ == kind


_LEAST = {"rank": 0, "world": 1, "parameters": 1, "every": 1, "period": 1, "step": 0, "at": 0, "bits": 0}
_SHARES = ("density", "cut")
_MOST_LETTERS = 500


def _in_range(name: str, value: Any) -> bool:
    """Return whether a recorder could have seen it. The loss and what is found in vectors are not checked."""
    if name in _LEAST:
        return bool(_LEAST[name] <= value <= _LARGEST)
    if name in _SHARES:
        return value is None or 0 <= value <= 1 + 1e-6  # six digits are kept
    if name == "seconds":
        return len(value) <= _MOST_STAGES and all(
            0 <= each <= _LARGEST and len(stage) <= _MOST_LETTERS for stage, each in value.items()
        )
    return not isinstance(value, str) or len(value) <= _MOST_LETTERS


@dataclass(frozen=True, slots=True)
class Record:
    header: Header
    lines: Sequence[Line]

    def column(self, name: str) -> tuple[list[int], list[float]]:
        """Steps that have this figure, and the figures."""
        known = [(line.step, value) for line in self.lines if (value := getattr(line, name)) is not None]
        return [step for step, _ in known], [float(value) for _, value in known]


def read(path: Path) -> Record:
    """Read all runs from all pieces; of steps that were taken again the later lines."""
    whole, lines = Whole(path), list[Line]()
    for line in whole.each():
        while lines and lines[-1].step >= line.step:
            lines.pop()
        lines.append(line)
    for said in whole.joined.torn:
        _log.warning("%s", said)
    return Record(whole.header, lines)


class Joined:
    """Lives of one training, one after the other. Steps that a later life took again are given again: a
    reader that keeps lines drops its own from there on."""

    def __init__(self) -> None:
        self.header: Header | None = None  # header of the latest run
        self.lives = 0
        self.again = 0  # steps of earlier runs that were taken again
        self.torn: list[str] = []  # a sentence for each unfinished line
        self._first: int | None = None
        self._last: Line | None = None
        self._end = self._shift = 0.0
        self._begins = False
        self._unfinished: str | None = None

    def take(self, path: Path, place: int, text: str) -> Line | None:
        """A line of a file; None where it is no step's."""
        found, where = json_in(text), f"{path}, line {place}"
        if MARK in found or place == 1:
            self._begin(path, header_in(path, text, place))
            return None
        if self._unfinished is not None and found:
            raise Malformed(self._unfinished)
        if not found:  # whether it was torn is known with the next one: a header, or no more
            self._unfinished = f"{where}: not as a record has it, in JSON"
            self.tear(where)
            return None
        line = entry_of(Line, found, where)
        self._place_in_time(path, line)
        self._last, self._end = line, line.at
        return line

    def tear(self, where: str) -> None:
        self.torn.append(f"{where} was not finished (a full disk, or a kill): what was recorded ends there")

    def loosen(self) -> None:
        self._last, self._unfinished = None, None

    def _begin(self, path: Path, header: Header) -> None:
        before, self._unfinished = self.header, None
        if before is not None and (odd := differences(header, before)):
            raise Malformed(f"{path} is of two trainings: {', '.join(odd)}")
        self.header = header
        if before is None or header.began != before.began:
            self.lives += 1
            self._begins = True

    def _place_in_time(self, path: Path, line: Line) -> None:
        """Continue the clock of the run before: the time between two runs does not count."""
        before = self._last
        if self._first is None or (self._begins and line.step <= self._first):
            self._first, self._shift = line.step, 0.0
        elif self._begins:
            self._shift = self._end
        line.at += self._shift
        if self._begins and before is not None:
            self.again += max(0, before.step - line.step + 1)
        elif before is not None and (line.step <= before.step or line.at < before.at):
            raise Malformed(f"{path}: step {line.step} does not come after step {before.step}")
        self._begins = False


class Whole:
    """A record from its beginning, with all pieces it was divided into."""

    def __init__(self, path: Path) -> None:
        self.path, self.joined = path, Joined()
        self.is_cut_off = False  # the last line is unfinished

    @property
    def header(self) -> Header:
        if self.joined.header is None:
            raise Malformed(f"{self.path} is empty, or was cut off in the middle of its first line")
        return self.joined.header

    def each(self) -> Iterator[Line]:
        for piece in pieces(self.path):
            tail = Tail(piece, joined=self.joined)
            try:
                yield from tail.each()
            except Malformed:
                if piece != self.path and not piece.exists():
                    continue  # it was removed in between
                raise
            self.is_cut_off = bool(tail.rest)
            if tail.rest:
                self.joined.tear(f"{piece}, line {tail.place + 1}")
        _ = self.header


class Tail:
    """A file that may still be written: each look gives the lines that were finished since the one before."""

    def __init__(self, path: Path, most: int | None = None, joined: Joined | None = None) -> None:
        self.path, self.most = path, most  # most: bytes read at a time; of a file that grew more, the end
        self.joined, self._is_part = joined or Joined(), joined is not None
        self._file = 0  # inode: a file that was moved away is another under the same name
        self._begin()

    def _begin(self) -> None:
        self.rest = b""  # of an unfinished line
        self._offset = self.place = 0

    @property
    def header(self) -> Header | None:
        return self.joined.header

    def more(self) -> list[Line]:
        return list(self.each())

    def each(self) -> Iterator[Line]:
        for text in self._texts():
            self.place += 1
            if self.place == 1 and not self._is_part:
                self._follow_on(header_in(self.path, text))
            line = self.joined.take(self.path, self.place, text)
            if line is not None:
                yield line

    def _follow_on(self, header: Header) -> None:
        """A file that takes another's place may be of another training."""
        if self.header is not None and differences(header, self.header):
            self.joined = Joined()

    def _texts(self) -> Iterator[str]:
        try:
            with self.path.open("rb") as file:
                size, number = file.seek(0, 2), os.fstat(file.fileno()).st_ino
                if size < self._offset or (self._file and number != self._file):  # a new one in its place
                    self._begin()
                    self.joined.loosen()
                self._file = number
                if self.place == 0:
                    file.seek(self._offset)
                    yield from self._finished(file.readline(LONGEST))
                if self.most is not None and size - self._offset > self.most:
                    self._offset, self.rest = size - self.most, b""
                    file.seek(self._offset)
                    self._offset += len(file.readline())  # the end of a line whose beginning is not read
                    self.joined.loosen()
                file.seek(self._offset)
                while content := file.readline(LONGEST):
                    yield from self._finished(content)
        except (OSError, UnicodeDecodeError) as error:
            raise Malformed(f"{self.path} cannot be read: {error}") from error

    def _finished(self, content: bytes) -> Iterator[str]:
        self._offset += len(content)
        self.rest += content
        if len(self.rest) >= LONGEST:
            raise Malformed(f"{self.path}, line {self.place + 1}: longer than any of a record")
        if self.rest.endswith(b"\n"):
            whole, self.rest = self.rest, b""
            yield whole.decode()
