"""Tests in this folder need a machine that can hold a lab, and must leave it as they found it."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from gradsieve.lab import available


@pytest.fixture(scope="session", autouse=True)
def machine_can_hold_a_lab() -> None:
    reason = available()
    if reason is not None:
        pytest.skip(f"no lab here: {reason}")


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    yield
    assert namespaces_of(os.getpid()) == []


def namespaces_of(pid: int) -> list[str]:
    """What the machine holds under the name of the lab that process `pid` runs or ran."""
    folders = [Path("/run/netns"), Path("/etc/netns")]
    return sorted(str(path) for folder in folders if folder.is_dir() for path in folder.glob(f"gs{pid}-*"))
