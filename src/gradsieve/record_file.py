"""Each rank's record is a file of JSON, one line an exchange.

    {"gradsieve_record": 1, "name": "exdyna", "scheme": "exdyna", "rank": 0, "world": 4, ...}
    {"step": 1, "at": 0.8, "density": 0.01, ...}

A training that is started again continues its file, with a header of its own. docs/recording.md has the
fields, and `gradsieve_tools.records` reads them.
"""

from __future__ import annotations

import errno
import json
import logging
import math
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any

from gradsieve.errors import ConfigError

_log = logging.getLogger("gradsieve")

VERSION, MARK, SUFFIX = 1, "gradsieve_record", ".jsonl"
MAY_DIFFER = {"name", "every", "began"}  # in headers of one training
LONGEST = 1 << 16  # characters in a line; one of ours has some hundreds
_DIGITS = 6  # more would be the clock's noise


class RecordFile:
    """Append lines, each with one write. A line that a full disk does not take whole is lost, and the next
    one that fits comes below a header again, on a line of its own."""

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        """Raise ConfigError if no file can be created; a disk that is full may have space later."""
        self.path, self._has_warned = path, False
        self.begin(header)
        try:
            self._file = self._opened()
        except OSError as error:
            raise ConfigError(f"the record cannot be written: {error}") from error
        self._append("")

    def begin(self, header: Mapping[str, Any]) -> None:
        """Put a header above the next line: the training was started again."""
        self._header, self._unwritten = header, text_of(header)

    def write(self, line: Mapping[str, Any]) -> None:
        self._append(text_of(line))

    def close(self) -> None:
        self._file.close()

    def _append(self, text: str) -> None:
        file, begins = self._file, ""
        try:
            if self._unwritten and file.seek(0, 2):
                file.seek(-1, 2)
                begins = "" if file.read(1) == b"\n" else "\n"  # below a torn line
            content = (begins + self._unwritten + text).encode()
            if file.write(content) != len(content):
                raise OSError(errno.ENOSPC, "No space left on device")
            self._unwritten = ""
        except OSError as error:
            self._lose(error)

    def _lose(self, error: OSError) -> None:
        self._unwritten = text_of(self._header)
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "rank %d: %s cannot be written: %s. The training goes on without its record, which goes on "
                "when it can be written again; this is logged once",
                self._header["rank"],
                self.path,
                error.strerror or error,
            )

    def _opened(self) -> FileIO:
        path = self.path
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size and (odd := self._oddities()):
            number = 1
            while (aside := path.with_name(f"{path.name}.{number}")).exists():
                number += 1
            path.rename(aside)
            _log.warning("rank %d: %s is %s; it was moved to %s", self._header["rank"], path, odd, aside.name)
        return FileIO(path, "a+")

    def _oddities(self) -> str:
        """Say why the lines of this training do not belong below those in the file."""
        try:
            with self.path.open("rb") as file:
                first = json.loads(file.readline(LONGEST))
            there = {name: first[name] for name in self._header}
        except (ValueError, TypeError, KeyError):
            return "no record of a training"
        wanted = {name: value for name, value in _plain(self._header).items() if name not in MAY_DIFFER}
        odd = [f"{name} {there[name]}, not {value}" for name, value in wanted.items() if there[name] != value]
        return f"of another training ({', '.join(odd)})" if odd else ""


def path_of(stem: Path, rank: int) -> Path:
    return stem.with_name(f"{stem.name}.rank{rank}{SUFFIX}")


def text_of(entry: Mapping[str, Any]) -> str:
    return json.dumps(_plain(entry), allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    """Replace what JSON does not have: a training may diverge to infinity."""
    if isinstance(value, Mapping):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None
    return value
