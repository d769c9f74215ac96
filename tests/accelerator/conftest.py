"""The fake device, built once, and ranks that can load it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from accelerator import device
from multiproc.harness import Ranks


@pytest.fixture(scope="session")
def library() -> Path:
    return device.build()


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    with Ranks(4) as ranks:
        yield ranks
