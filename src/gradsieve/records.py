"""What a recorded training leaves behind: lines of JSON, one a step, a file a rank.

    {"gradsieve_record": 1, "name": ..., "scheme": ..., "rank": 0, "world": 4, ...}     the first line
    {"step": 1, "at": 0.8, "density": 0.01, ...}                                        then a line a step

docs/recording.md says what the fields mean. What is read is checked: version, fields, their types and order;
a file that was cut off in the middle of a line is refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from gradsieve.errors import Malformed

VERSION = 1
_MARK = "gradsieve_record"
SUFFIX = ".jsonl"
_DIGITS = 6
"""Of numbers in a file: more would be the clock's noise."""


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
    try:
        texts = path.read_text().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise Malformed(f"{path} cannot be read: {error}") from error
    if texts.pop() or not texts:
        raise Malformed(f"{path} is empty, or was cut off in the middle of a line")
    header = _header(path, texts[0])
    lines = [_entry(Line, _json(text), f"{path}, line {place}") for place, text in enumerate(texts[1:], 2)]
    for before, after in pairwise(lines):
        if after.step <= before.step or after.at < before.at:
            raise Malformed(f"{path}: step {after.step} does not come after step {before.step}")
    return Record(header, lines)


def _header(path: Path, text: str) -> Header:
    found = _json(text)
    version = found.pop(_MARK, None)
    if version is None:
        raise Malformed(f"{path} is no record of a training: its first line does not say {_MARK}")
    if version != VERSION:
        raise Malformed(f"{path} has version {version!r}, and this gradsieve reads {VERSION}")
    return _entry(Header, found, f"{path}, line 1")


def _json(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


Entry = TypeVar("Entry", Header, Line)


def _entry(kind: type[Entry], found: dict[str, Any], where: str) -> Entry:
    names = [field.name for field in fields(kind)]
    if sorted(found) != sorted(names):
        wrong = sorted(set(found) ^ set(names))
        raise Malformed(f"{where}: not as a record has it, in {', '.join(wrong[:6])}")
    for each in fields(kind):
        if not _fits(found[each.name], str(each.type)):
            raise Malformed(f"{where}: {each.name} is {found[each.name]!r}")
    return kind(**found)


def _fits(value: Any, kind: str) -> bool:
    """Whether a value is what the annotation of its field says."""
    if kind.startswith("Mapping"):
        return isinstance(value, dict) and all(_fits(each, "float") for each in value.values())
    if value is None:
        return kind.endswith("None")
    if kind.startswith("float"):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number and math.isfinite(value)
    return type(value).__name__ == kind
