"""The file that a recorder writes: added to by every life of a training, divided when it is long.

    run.rank0.jsonl        is written now
    run.rank0.jsonl.1      came before it, and .2 after .1: the larger the number, the later

Recording never ends a training. What cannot be written is left out and reported once; when the disk has space
again the record goes on, with a header on a line of its own, below whatever was torn. A line is one write to
the end of the file, and a life that finds another's header below its own lines writes no more: a process that
was taken for dead must not mix its steps into those of its successor.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from io import FileIO
from pathlib import Path

from gradsieve.errors import ConfigError, Malformed
from gradsieve.observe.records import MARK, Header, Line, differences, header_of, numbered, pieces, text_of

_log = logging.getLogger("gradsieve")

MOST_BYTES = 64 << 20
"""Of one file: about 160,000 steps."""
KEPT = 7
"""Files before the one that is written. With it they are half a gigabyte a rank, however long it trains."""
_FULL = (errno.ENOSPC, errno.EDQUOT)


class RecordFile:
    def __init__(self, path: Path, header: Header) -> None:
        """ConfigError where no file can be; a disk that is full now may have space later."""
        self.path, self._header = path, header
        self._file: FileIO | None = None
        self._size = 0
        self._ends_line = True
        self._owes_header = True
        """Before the next line."""
        self._has_warned = self._is_replaced = False
        try:
            self._open()
            self._put("")
        except OSError as error:
            if error.errno not in _FULL:
                raise ConfigError(f"the record cannot be written: {error}") from error
            self._warn(error)

    def begin(self, header: Header) -> None:
        """Another life in the same process."""
        self._header, self._owes_header = header, True

    def write(self, line: Line) -> None:
        text = text_of(line)
        try:
            if self._file is None:
                self._open()
            self._look_for_successor()
            if self._is_replaced:
                return
            if self._size + len(text) > MOST_BYTES:
                self._divide()
            self._put(text)
        except OSError as error:
            self._owes_header = True
            self._warn(error)

    def _look_for_successor(self) -> None:
        assert self._file is not None
        size = os.fstat(self._file.fileno()).st_size
        if size <= self._size or self._is_replaced:
            return
        self._file.seek(self._size)
        if MARK.encode() in self._file.read(size - self._size):
            self._is_replaced = True
            _log.warning(
                "rank %d: another process records to %s now, and this one no longer does. If it is a former "
                "life of the same training, end it",
                self._header.rank,
                self.path,
            )
        self._size = size

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()

    def _open(self) -> None:
        path = self.path
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size and (odd := self._oddities()):
            aside = self._next_number()
            path.rename(aside)
            _log.warning("rank %d: %s is %s; it was moved to %s", self._header.rank, path, odd, aside.name)
        self._file = FileIO(path, "a+")
        self._size = self._file.seek(0, 2)
        self._ends_line = True
        if self._size:
            self._file.seek(-1, 2)
            self._ends_line = self._file.read(1) == b"\n"

    def _oddities(self) -> str:
        """What keeps this training's lines out of the file that is there."""
        try:
            odd = differences(header_of(self.path), self._header)
        except Malformed:
            return "no record of a training"
        return f"of another training ({', '.join(odd)})" if odd else ""

    def _next_number(self) -> Path:
        last = max((number for number, _ in numbered(self.path)), default=0)
        return self.path.with_name(f"{self.path.name}.{last + 1}")

    def _divide(self) -> None:
        """The new file is there before the old one is moved: on a full disk the old one keeps its place."""
        assert self._file is not None
        new = self.path.with_name(f"{self.path.name}.new")
        new.write_text(text_of(self._header))
        with contextlib.suppress(FileNotFoundError):  # somebody cleaned up
            self.path.rename(self._next_number())
        new.rename(self.path)
        self._file.close()
        self._file, self._owes_header = None, False
        self._open()
        for old in pieces(self.path)[: -1 - KEPT]:
            with contextlib.suppress(OSError):
                old.unlink()

    def _put(self, text: str) -> None:
        assert self._file is not None
        before = "" if self._ends_line else "\n"
        if self._owes_header:
            text = before + text_of(self._header) + text
        rest = text.encode()
        while rest:
            written = self._file.write(rest) or 0  # fewer bytes than given where the disk is nearly full
            self._size += written
            if written:
                self._ends_line = rest[written - 1 : written] == b"\n"
            rest = rest[written:]
        self._owes_header = False

    def _warn(self, error: OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "rank %d: %s cannot be written: %s. The training goes on without its record, which goes on "
                "when it can be written again; this is said once",
                self._header.rank,
                self.path,
                error.strerror or error,
            )
