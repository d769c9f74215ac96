"""What a recorded training leaves behind: lines of JSON, one a step, a file a rank.

    {"gradsieve_record": 1, "name": ..., "scheme": ..., "rank": 0, "world": 4, ...}     the first line
    {"step": 1, "at": 0.8, "density": 0.01, ...}                                        then a line a step

docs/recording.md says what the fields mean. What is read is checked: version, fields, their types, ranges and
order; a file that was cut off in the middle of a line is refused. `Tail` reads one that is still written.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from gradsieve.errors import Malformed, printable

VERSION = 1
_MARK = "gradsieve_record"
SUFFIX = ".jsonl"
_DIGITS = 6
"""Of numbers in a file: more would be the clock's noise."""
_LONGEST = 1 << 16
"""Characters in a line. One of ours has some hundreds."""
_MOST_STAGES = 64
_LARGEST = 1 << 53
"""Up to here a float has every whole number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What holds for all lines of a file."""

    name: str
    scheme: str
    """With its settings, as `gradsieve bench` takes it."""
    exchange: str
    """`steps` or `gradients`."""
    density: float
    """The target."""
    rank: int
    world: int
    parameters: int
    every: int
    """Steps between two lines that have norms."""
    period: int = 1
    """Steps of the training for one exchange, and so for one line."""

    @property
    def bytes_a_bit(self) -> float:
        """Moved by a rank in an exchange, for each bit a parameter and step."""
        return self.parameters * self.period / 8


@dataclass(slots=True, kw_only=True)
class Line:
    """One step of one rank; None where there is no such figure, or nobody looked."""

    step: int
    at: float
    """Seconds since the recording began."""
    density: float
    bits: float
    """Moved by this rank, a parameter."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """By stage."""
    threshold: float | None = None
    imbalance: float | None = None
    """f(t): the longest selection over the mean, before any row is cut."""
    cut: float | None = None
    """Share of the ranks that could not send all they selected."""
    waiting: float | None = None
    """Norm of what waits."""
    age: float | None = None
    """Steps for which what is sent now has waited."""
    contraction: float | None = None
    """|acc - spent|^2 / |acc|^2."""
    xi: float | None = None
    """|top-k of the ranks' mean - update| / |mean of what is new|: where one process has all ranks."""
    loss: float | None = None


@dataclass(frozen=True, slots=True)
class Record:
    header: Header
    lines: Sequence[Line]

    def column(self, name: str) -> tuple[list[int], list[float]]:
        """Steps that have this figure, and the figures."""
        known = [(line.step, value) for line in self.lines if (value := getattr(line, name)) is not None]
        return [step for step, _ in known], [float(value) for _, value in known]


def path_of(stem: Path, rank: int) -> Path:
    """The file of one rank."""
    return stem.with_name(f"{stem.name}.rank{rank}{SUFFIX}")


def text_of(entry: Header | Line) -> str:
    """One line of a file."""
    plain = {name: _short(value) for name, value in asdict(entry).items()}
    if isinstance(entry, Header):
        plain = {_MARK: VERSION, **plain}
    return json.dumps(plain, allow_nan=False) + "\n"


def _short(value: Any) -> Any:
    """What is not finite, of a training that diverged, has no place in JSON."""
    if isinstance(value, dict):
        return {name: _short(each) for name, each in value.items()}
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None
    return value


def read(path: Path) -> Record:
    """A whole file."""
    tail = Tail(path)
    lines = tail.more()
    if tail.rest or tail.header is None:
        raise Malformed(f"{path} is empty, or was cut off in the middle of a line")
    return Record(tail.header, lines)


class Tail:
    """A file that may still be written: each look gives the lines that were finished since the one before."""

    def __init__(self, path: Path, most: int | None = None) -> None:
        self.path, self.most = path, most
        """Bytes read at a look: a file that has grown by more is read from there to its end."""
        self._begin()

    def _begin(self) -> None:
        self.header: Header | None = None
        self.rest = b""
        """Of a line whose end is not there yet."""
        self._offset = self._place = 0
        self._last: Line | None = None

    def more(self) -> list[Line]:
        return list(self.each())

    def each(self) -> Iterator[Line]:
        """The same, one at a time."""
        for text in self._texts():
            self._place += 1
            if self.header is None:
                self.header = _header(self.path, text)
                continue
            line = _entry(Line, _json(text), f"{self.path}, line {self._place}")
            before, self._last = self._last, line
            if before is not None and (line.step <= before.step or line.at < before.at):
                raise Malformed(f"{self.path}: step {line.step} does not come after step {before.step}")
            yield line

    def _texts(self) -> Iterator[str]:
        try:
            with self.path.open("rb") as file:
                size = file.seek(0, 2)
                if size < self._offset:  # written anew, by a training that was started again
                    self._begin()
                if self.header is None:
                    file.seek(self._offset)
                    yield from self._finished(file.readline(_LONGEST))
                if self.most is not None and size - self._offset > self.most:
                    self._offset, self.rest = size - self.most, b""
                    file.seek(self._offset)
                    self._offset += len(file.readline())  # the end of a line whose beginning is not read
                file.seek(self._offset)
                while content := file.readline(_LONGEST):
                    yield from self._finished(content)
        except (OSError, UnicodeDecodeError) as error:
            raise Malformed(f"{self.path} cannot be read: {error}") from error

    def _finished(self, content: bytes) -> Iterator[str]:
        self._offset += len(content)
        self.rest += content
        if len(self.rest) >= _LONGEST:
            raise Malformed(f"{self.path}, line {self._place + 1}: longer than any of a record")
        if self.rest.endswith(b"\n"):
            whole, self.rest = self.rest, b""
            yield whole.decode()


def _header(path: Path, text: str) -> Header:
    found = _json(text)
    version = found.pop(_MARK, None)
    if version is None:
        raise Malformed(f"{path} is no record of a training: its first line does not say {_MARK}")
    if version != VERSION:
        raise Malformed(f"{path} has version {version!r}, and this gradsieve reads {VERSION}")
    found.setdefault("period", 1)  # files from before it was told
    return _entry(Header, found, f"{path}, line 1")


def _json(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


Entry = TypeVar("Entry", Header, Line)


_KINDS: dict[type, dict[str, str]] = {
    kind: {each.name: str(each.type) for each in fields(kind)} for kind in (Header, Line)
}


def _entry(kind: type[Entry], found: dict[str, Any], where: str) -> Entry:
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
    """Whether a value is what the annotation of its field says."""
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
    """Whether a recorder could have seen it. What it is told (the loss) or finds in vectors is not judged."""
    if name in _LEAST:
        return bool(_LEAST[name] <= value <= _LARGEST)
    if name in _SHARES:
        return value is None or 0 <= value <= 1 + 1e-6  # six digits are kept
    if name == "seconds":
        return len(value) <= _MOST_STAGES and all(
            0 <= each <= _LARGEST and len(stage) <= _MOST_LETTERS for stage, each in value.items()
        )
    return not isinstance(value, str) or len(value) <= _MOST_LETTERS
