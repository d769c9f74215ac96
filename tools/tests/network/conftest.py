"""Tests in this folder need a machine that can hold a lab, and must leave it as they found it."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gradsieve_tools.emulation import available


@pytest.fixture(scope="session", autouse=True)
def machine_can_hold_a_lab() -> None:
    reason = available()
    if reason is not None:
        pytest.skip(f"no lab here: {reason}")


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    yield
    assert _traces_of(os.getpid()) == []


@pytest.fixture
def traces_of() -> Callable[[int], list[str]]:
    """What the machine holds under the name of the lab that a process runs or ran."""
    return _traces_of


def _traces_of(pid: int) -> list[str]:
    folders = [Path("/var/run/netns"), Path("/etc/netns")]
    return sorted(str(path) for folder in folders if folder.is_dir() for path in folder.glob(f"gs{pid}-*"))
