"""What can be fuzzed: one table. A new kind of bytes is its file of entry points and a line here."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate
from random import Random

from gradsieve.errors import ConfigError
from gradsieve_tools.fuzz.entry_points import exchanges, files, pipelines, readers
from gradsieve_tools.fuzz.entry_points.entry_point import EntryPoint
from gradsieve_tools.fuzz.forge import altered
from gradsieve_tools.fuzz.mutate import mutant, one_of

# messages from one seeding; messages in a row for one entry point, while caches are warm
_BLOCK, _RUN = 256, 32


@dataclass(frozen=True)
class Family:
    """Entry points of one kind, and the share of all messages that goes to them: by price, so that each kind
    takes about as long as another."""

    name: str
    share: float
    entries: Callable[[], Iterable[EntryPoint]]
    alter: Callable[[Random, EntryPoint], bytearray] = mutant


TARGETS: dict[str, tuple[Family, ...]] = {
    "frames": (
        Family("read by numpy", 0.80, readers.on_the_host),
        Family("read by torch", 0.187, readers.on_the_device),
        Family("exchanges", 0.012, exchanges.entries),
        Family("pipelines", 0.001, pipelines.entries),
    ),
    "checkpoints": (
        Family("files of tensors", 0.54, files.of_tensors, altered),
        Family("folders", 0.45, files.of_folders, altered),
        Family("large files", 0.01, files.large, altered),
    ),
}


class Cases:
    """Numbered messages: the same one for the same target, seed and number, on every machine."""

    def __init__(self, target: str, seed: int) -> None:
        if target not in TARGETS:
            raise ConfigError(f"no target is called {target!r}; there are: {', '.join(TARGETS)}")
        self.families = TARGETS[target]
        self.entries = [list(family.entries()) for family in self.families]
        self._edges = list(accumulate(family.share for family in self.families))
        self._seed = seed
        self._source = Random()
        self._next, self._left = -1, 0

    def case(self, number: int) -> tuple[int, EntryPoint, bytearray]:
        """Return family, entry point and message. Seeding is done once a block, whose messages are made in
        order."""
        if number != self._next or not number % _BLOCK:
            block = number // _BLOCK
            self._source.seed(self._seed << 48 | block)
            self._left = 0
            for _ in range(block * _BLOCK, number):
                self._make()
        self._next = number + 1
        return self._make()

    def _make(self) -> tuple[int, EntryPoint, bytearray]:
        source = self._source
        if not self._left:
            self._left = _RUN
            self._family = min(bisect(self._edges, source.random() * self._edges[-1]), len(self._edges) - 1)
            self._entry = one_of(source, self.entries[self._family])
        self._left -= 1
        return self._family, self._entry, self.families[self._family].alter(source, self._entry)
