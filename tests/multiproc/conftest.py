"""Pools of ranks for the tests in this folder, one of each size a module."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache

import pytest

from multiproc.harness import Ranks

Pool = Callable[[int], Ranks]


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """The module's ranks, by their number."""
    with ExitStack() as stack:
        yield cache(lambda world: stack.enter_context(Ranks(world)))
    assert multiprocessing.active_children() == []


@pytest.fixture(scope="module")
def two(pool: Pool) -> Ranks:
    return pool(2)


@pytest.fixture(scope="module")
def four(pool: Pool) -> Ranks:
    return pool(4)
