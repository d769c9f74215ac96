"""What ranks tell each other through the store of their rendezvous, under a prefix that nobody else knows.

`news/n` exists where something new was put: whoever looks reads one key, until there is.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

from gradsieve.errors import printable

TEXT = 300  # characters of a note


class Store(Protocol):
    """As much of torch's store as is needed."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def check(self, keys: list[str], /) -> bool: ...
    def wait(self, keys: list[str], timeout: timedelta, /) -> None: ...


Connect = Callable[[float], Store]  # to a store, within so many seconds


def parsed(content: bytes, longest: int = TEXT) -> Any:
    """JSON of a peer's; None where it is none."""
    try:
        return json.loads(content[:longest])
    except (ValueError, RecursionError):
        return None


class Notes:
    """A store's keys under one prefix. Its methods raise RuntimeError where the store is gone."""

    def __init__(self, store: Store, prefix: str) -> None:
        self._store, self._prefix = store, prefix
        self._connect: Connect | None = None
        self._seen = 0  # news

    def move_to(self, connect: Connect | None, prefix: str, seconds: float = 30.0) -> None:
        """From now on under that prefix; in a connection of its own, if there is one to be had."""
        store = self._store if connect is None else connect(seconds)
        self._store, self._prefix, self._seen, self._connect = store, prefix, 0, connect

    @property
    def can_reconnect(self) -> bool:
        return self._connect is not None

    def reconnect(self, seconds: float) -> None:
        """The server may be a new one, which knows of nothing: all news are new again."""
        self.move_to(self._connect, self._prefix, seconds)

    def has(self, name: str) -> bool:
        return self._store.check([self._key(name)])

    def get(self, name: str) -> bytes:
        return self._store.get(self._key(name))

    def words(self, name: str) -> str:
        """A peer's, of which nothing is longer or stranger than a log line may be."""
        return printable(self.get(name)[:TEXT])

    def put(self, name: str, text: str, longest: int = TEXT) -> None:
        self._store.set(self._key(name), text[:longest])

    def add(self, name: str, amount: int) -> int:
        return self._store.add(self._key(name), amount)

    def wait(self, name: str, seconds: float) -> None:
        self._store.wait([self._key(name)], timedelta(seconds=seconds))

    def has_news(self) -> bool:
        """Since it was last asked: one request where there are none."""
        before = self._seen
        while self.has(f"news/{self._seen}"):
            self._seen += 1
        return self._seen > before

    def announce(self) -> None:
        """Say that there is news. Two keys: another rank may do so at the same time, and be seen first."""
        number = self._seen
        while self.has(f"news/{number}"):
            number += 1
        for one in (number, number + 1):
            self.put(f"news/{one}", "1")

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}"
