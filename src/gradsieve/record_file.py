"""The file of a record: JSON, one line an exchange, in one file a rank.

    {"gradsieve_record": 1, "name": "exdyna", "scheme": "exdyna", "rank": 0, "world": 4, ...}
    {"step": 1, "at": 0.8, "density": 0.01, ...}

A training that is started again goes on in its file, with a header of its own. docs/recording.md has the
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
_FULL = (errno.ENOSPC, errno.EDQUOT)


class RecordFile:
    """Each line is one write to the end of the file. A line that a full disk does not take whole is lost, and
    the next one that fits comes below a header again, on a line of its own."""

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        """ConfigError where no file can be; a disk that is full now may have space later."""
        self.path, self._has_warned = path, False
        self._file: FileIO | None = None
        self.begin(header)
        try:
            self._append("")
        except OSError as error:
            if error.errno not in _FULL:
                raise ConfigError(f"the record cannot be written: {error}") from error
            self._lose(error)

    def begin(self, header: Mapping[str, Any]) -> None:
        """Another life of the training begins with the next line."""
        self._header, self._owed = header, text_of(header)

    def write(self, line: Mapping[str, Any]) -> None:
        try:
            self._append(text_of(line))
        except OSError as error:
            self._lose(error)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _append(self, text: str) -> None:
        file = self._file = self._file or self._opened()
        begins = ""
        if self._owed and file.seek(0, 2):
            file.seek(-1, 2)
            begins = "" if file.read(1) == b"\n" else "\n"  # below a torn line
        content = (begins + self._owed + text).encode()
        if file.write(content) != len(content):
            raise OSError(errno.ENOSPC, "No space left on device")
        self._owed = ""

    def _lose(self, error: OSError) -> None:
        self._owed = text_of(self._header)
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
        """Why the lines of this training do not go below what is there."""
        try:
            with self.path.open("rb") as file:
                first = json.loads(file.readline(LONGEST))
            there = {name: first[name] for name in self._header}
        except (ValueError, TypeError, KeyError):
            return "no record of a training"
        pairs = [(name, there[name], value) for name, value in _plain(self._header).items()]
        odd = [f"{name} {a}, not {b}" for name, a, b in pairs if name not in MAY_DIFFER and a != b]
        return f"of another training ({', '.join(odd)})" if odd else ""


def path_of(stem: Path, rank: int) -> Path:
    """The file of one rank."""
    return stem.with_name(f"{stem.name}.rank{rank}{SUFFIX}")


def text_of(entry: Mapping[str, Any]) -> str:
    return json.dumps(_plain(entry), allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    """JSON has no infinity, to which a training may diverge."""
    if isinstance(value, Mapping):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None
    return value
