"""Say before a measurement, rather than in its middle, that the machine is too small for it."""

from __future__ import annotations

import os

from gradsieve.errors import ConfigError


def check_fits(needed: int, what: str, fix: str) -> None:
    """`what` needs so many bytes; more than half of the machine's memory is refused."""
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > there / 2:
        raise ConfigError(
            f"{what} need {needed / 2**30:.0f} GiB; there are {there / 2**30:.0f} GiB here: {fix}"
        )
