"""What measurements ask of the machine: memory for all of it, and one thread for a virtual rank."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from gradsieve.errors import ConfigError


def check_fits(needed: int, what: str, fix: str) -> None:
    """`what` needs so many bytes; more than half of the machine's memory is refused, before anything runs."""
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > there / 2:
        raise ConfigError(
            f"{what} need {needed / 2**30:.0f} GiB; there are {there / 2**30:.0f} GiB here: {fix}"
        )


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one thread: vectors are short, times are of one core, and recordings repeat bit by bit."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
