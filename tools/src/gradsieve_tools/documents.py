"""TOML files that people write or change, read with checks: what is wrong is named with its line.

    table = open_document(path)
    table.allow("rate", "links")          # any other key is refused
    rate = table.parsed("rate", parse_rate)

tomllib keeps no lines, so the text is gone through once more for where each key stands. That pass only says
where to look; what is read comes from tomllib alone.
"""

from __future__ import annotations

import difflib
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from gradsieve.errors import ConfigError, printable

Place: TypeAlias = tuple[str | int, ...]  # keys and list indices, outermost first
T = TypeVar("T")
MOST_BYTES = 4 << 20
_PART = re.compile(r"[\w-]+|\"[^\"]*\"|'[^']*'")
_KEY = re.compile(rf"\s*(\[\[?)?\s*((?:{_PART.pattern})(?:\s*\.\s*(?:{_PART.pattern}))*)\s*([\]=])")


def open_document(path: Path) -> Table:
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    if len(content) > MOST_BYTES:
        raise ConfigError(f"{path} has more than {MOST_BYTES >> 20} MiB: it is something else")
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}, line {line}: this is not UTF-8 text") from error
    return document(text, str(path))


def document(text: str, name: str) -> Table:
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        cause = re.sub(r" \(at .*\)$", "", str(error))
        found = re.search(r"at line (\d+)", str(error))
        line = found[1] if found else str(text.count("\n") + 1)
        raise ConfigError(f"{name}, line {line}: {printable(cause.encode())}") from error
    except (RecursionError, ValueError) as error:  # brackets in brackets; numbers of thousands of digits
        raise ConfigError(f"{name}: this is no TOML: {type(error).__name__}") from error
    return Table(name, _lines(text), (), values)


class Table:
    def __init__(self, name: str, lines: dict[Place, int], place: Place, values: dict[str, Any]) -> None:
        self._name, self._lines, self._place = name, lines, place
        self.values = values

    def error(self, cause: str, *keys: str | int) -> ConfigError:
        place = (*self._place, *keys)
        while place and place not in self._lines:
            place = place[:-1]
        where = f", line {self._lines[place]}" if place in self._lines else ""
        return ConfigError(f"{self._name}{where}: {cause}")

    def allow(self, *keys: str) -> None:
        for key in self.values:
            if key not in keys:
                near = difflib.get_close_matches(key, keys, 1)
                hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(keys)}"
                raise self.error(f"{key!r} is not known here: {hint}", key)

    def need(self, *keys: str) -> None:
        for key in keys:
            if key not in self.values:
                raise self.error(f"{key!r} is missing")

    def text(self, key: str) -> str:
        value: str = self._of(key, str, 'text in quotes, such as "rack"')
        return value

    def whole(self, key: str, least: int, most: int) -> int:
        value: int = self._of(key, int, "a whole number")
        if not least <= value <= most:
            raise self.error(f"{key} is {value}; it is {least:,} to {most:,}", key)
        return value

    def number(self, key: str, least: float, most: float) -> float:
        value = float(self._of(key, (int, float), "a number"))
        if not (math.isfinite(value) and least <= value <= most):
            raise self.error(f"{key} is {value:g}; it is {least:g} to {most:g}", key)
        return value

    def texts(self, key: str) -> list[str]:
        values = self._of(key, list, 'a list of names, such as ["a", "b"]')
        if not all(isinstance(value, str) for value in values):
            raise self.error(f'{key} is a list of names, such as ["a", "b"]', key)
        return list(values)

    def parsed(self, key: str, parse: Callable[[str], T]) -> T:
        try:
            return parse(self.text(key))
        except ConfigError as error:
            if str(error).startswith(self._name):
                raise
            raise self.error(str(error), key) from error

    def table(self, key: str) -> Table:
        values = self._of(key, dict, f"a table, [{key}] and lines below it")
        return Table(self._name, self._lines, (*self._place, key), values)

    def tables(self, key: str) -> list[Table]:
        values = self._of(key, list, f"tables, each with [[{key}]] above it")
        if not all(isinstance(value, dict) for value in values):
            raise self.error(f"{key} are tables, each with [[{key}]] above it", key)
        return [Table(self._name, self._lines, (*self._place, key, i), v) for i, v in enumerate(values)]

    def _of(self, key: str, kind: type | tuple[type, ...], wanted: str) -> Any:
        self.need(key)
        value = self.values[key]
        if not isinstance(value, kind) or isinstance(value, bool):
            raise self.error(f"{key} is {wanted}", key)
        return value


def _lines(text: str) -> dict[Place, int]:
    """Find the line of each key, as far as one line tells; a list of tables has a place for each."""
    lines: dict[Place, int] = {}
    counts: dict[Place, int] = {}
    table: Place = ()

    def within(parts: list[str]) -> Place:
        """A header names the last table of a list."""
        place: Place = ()
        for part in parts:
            place = (*place, part)
            if place in counts:
                place = (*place, counts[place] - 1)
        return place

    for number, line in enumerate(text.splitlines(), 1):
        match = _KEY.match(line)
        if match is None or (match[1] is None) != (match[3] == "="):
            continue
        parts = [part.strip("\"'") for part in _PART.findall(match[2])]
        if match[1] == "[[":
            place = (*within(parts[:-1]), parts[-1])
            lines.setdefault(place, number)
            counts[place] = counts.get(place, 0) + 1
            table = (*place, counts[place] - 1)
        elif match[1] == "[":
            table = within(parts)
        lines.setdefault(table if match[1] else (*table, *parts), number)
    return lines
