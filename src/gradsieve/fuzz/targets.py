"""What can be fuzzed: one table. A new kind of bytes is its file of doors and a line here."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from random import Random

from gradsieve.errors import ConfigError
from gradsieve.fuzz import exchanges, pipelines, readers
from gradsieve.fuzz.door import Door
from gradsieve.fuzz.mutate import mutant


@dataclass(frozen=True)
class Family:
    """Doors of one kind, and the share of all messages that goes to them: by price, so that each kind takes
    about as long as another."""

    name: str
    share: float
    doors: Callable[[], Iterable[Door]]


TARGETS: dict[str, tuple[Family, ...]] = {
    "frames": (
        Family("read by numpy", 0.80, readers.on_the_host),
        Family("read by torch", 0.187, readers.on_the_device),
        Family("exchanges", 0.012, exchanges.doors),
        Family("pipelines", 0.001, pipelines.doors),
    ),
}
"""By name. Files that are read, such as checkpoints, have their own line here."""


class Cases:
    """Numbered messages: the same one for the same target, seed and number, on every machine."""

    def __init__(self, target: str, seed: int) -> None:
        if target not in TARGETS:
            raise ConfigError(f"no target is called {target!r}; there are: {', '.join(TARGETS)}")
        self.families = TARGETS[target]
        self.doors = [list(family.doors()) for family in self.families]
        self._shares = [family.share for family in self.families]
        self._seed = seed
        self._source = Random()

    def case(self, number: int) -> tuple[int, Door, bytearray]:
        """Which family, which door, and what is handed in there."""
        source = self._source
        source.seed(self._seed << 48 | number)
        point, family = source.random() * sum(self._shares), 0
        while point >= self._shares[family] and family < len(self._shares) - 1:
            point -= self._shares[family]
            family += 1
        door = source.choice(self.doors[family])
        return family, door, mutant(source, door)
