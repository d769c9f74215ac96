"""A folder of records while they are written: the last lines of every rank, by training.

Whatever is in the folder is looked at again each time: files may not be there yet, end in half a line, belong
to ranks that stopped or were started again, be moved away for a new one, or be no records at all.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from gradsieve.errors import Malformed
from gradsieve_tools.records import SUFFIX, Header, Line, Tail, differences

WINDOW = 50  # lines of a rank that are shown
_MOST_BYTES = 1 << 17  # bytes of a file read at a time: more than the window's lines
_MOST_FILES = 1024


@dataclass(slots=True)
class Rank:
    header: Header
    changed: float  # time.time() of the last growth
    lines: deque[Line] = field(default_factory=lambda: deque(maxlen=WINDOW))
    kept: dict[str, float] = field(default_factory=dict)  # last values of figures that only some steps have

    def take(self, line: Line) -> None:
        while self.lines and self.lines[-1].step >= line.step:
            self.lines.pop()
        if not self.lines:
            self.kept.clear()
        self.lines.append(line)
        for name in ("loss", "waiting", "age", "threshold", "imbalance", "cut"):
            value = getattr(line, name)
            if value is not None:
                self.kept[name] = value


class Folder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.ranks: dict[Path, Rank] = {}
        self.unreadable: dict[Path, str] = {}
        self.left_out = 0  # files beyond those that are followed
        self._tails: dict[Path, Tail] = {}

    def look(self) -> None:
        """Read what was written since the last look."""
        found = sorted(self.path.glob(f"*{SUFFIX}")) if self.path.is_dir() else []
        self.left_out = max(0, len(found) - _MOST_FILES)
        found = found[:_MOST_FILES]
        for gone in self.ranks.keys() - set(found):
            del self.ranks[gone], self._tails[gone]
        self.unreadable = {}
        for path in found:
            try:
                self._read(path)
            except Malformed as error:
                self.unreadable[path] = str(error)
                self.ranks.pop(path, None)
                self._tails.pop(path, None)

    def _read(self, path: Path) -> None:
        tail = self._tails.setdefault(path, Tail(path, _MOST_BYTES))
        lines = tail.more()
        if tail.header is None:
            return
        if path not in self.ranks or differences(tail.header, self.ranks[path].header):
            self.ranks[path] = Rank(tail.header, 0.0)
        rank = self.ranks[path]
        rank.header = tail.header
        for line in lines:
            rank.take(line)
        if lines or not rank.changed:
            try:
                rank.changed = path.stat().st_mtime
            except OSError as error:
                raise Malformed(f"{path} cannot be read: {error}") from error

    def trainings(self) -> list[list[Rank]]:
        """Ranks of each, by number; the one that was written last comes first."""
        found: dict[str, list[Rank]] = {}
        for rank in self.ranks.values():
            found.setdefault(rank.header.name, []).append(rank)
        ordered = [sorted(ranks, key=lambda rank: rank.header.rank) for ranks in found.values()]
        return sorted(ordered, key=lambda ranks: -max(rank.changed for rank in ranks))


def silent_for(rank: Rank) -> float:
    """Seconds since its file grew."""
    return max(0.0, time.time() - rank.changed)
