"""One process that hands messages in at entry points, with next to no memory beyond what it has at the
beginning.

    python -m gradsieve_tools.fuzz.worker TARGET SEED FIRST STOP PLACE

It says on stdout, in lines of JSON, how far it is and what it found; in the file PLACE stands the number of
the message that is being read, and STOP after the last, for the report on why this process died or
hangs.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import logging
import mmap
import os
import resource
import struct
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

import torch

from gradsieve_tools.fuzz.entry_points.entry_point import REFUSED
from gradsieve_tools.fuzz.targets import Cases

ALLOWED = 1 << 20  # bytes that reading may take besides twice the message
_OWN = 2 << 20  # bytes for the interpreter, which takes memory a MiB at a time
_LARGE = 1 << 16  # bytes from which on memory is mapped alone and counts exactly
_WARM_UP = 10  # altered messages at each entry point before the cap
_TELL = 1.0  # seconds between two lines
_MOST_FINDINGS = 20


def main(target: str, seed: str, first: str, stop: str, place: str) -> int:
    torch.set_num_threads(1)
    logging.disable()  # what a liar makes a pipeline say
    cases = Cases(target, int(seed))
    with Path(place).open("r+b") as file, mmap.mmap(file.fileno(), 8) as here:
        torch.set_grad_enabled(False)  # as the thread that exchanges has it
        _warm_up(cases)
        return _run(cases, int(first), int(stop), here, Cap())


def _warm_up(cases: Cases) -> None:
    """Hand valid messages to every entry point, so that loading is done before the memory cap."""
    source = Random(0)
    for family, entries in zip(cases.families, cases.entries, strict=True):
        for entry in entries:
            entry.enter(bytearray(entry.honest[0]))
            for _ in range(_WARM_UP):
                with contextlib.suppress(Exception):  # what is found is found again, under its number
                    entry.enter(family.alter(source, entry))
    gc.collect()


class Cap:
    """A limit on the memory that this process may take beyond what it has, for each message."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None)
        libc.mallopt(-3, _LARGE)  # M_MMAP_THRESHOLD
        libc.malloc_trim(0)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        self._before = pages * os.sysconf("SC_PAGE_SIZE") + ALLOWED + _OWN
        self._most = resource.getrlimit(resource.RLIMIT_AS)[1]

    def fit(self, length: int) -> None:
        """A message of so many bytes is there and will be read: itself, and twice as much."""
        resource.setrlimit(resource.RLIMIT_AS, (self._before + 3 * length, self._most))

    def lift(self) -> None:
        resource.setrlimit(resource.RLIMIT_AS, (self._most, self._most))


def _hand_in(cases: Cases, number: int, cap: Cap | None = None) -> tuple[int, str, str]:
    """Return the message's family, its outcome, and a finding if there is one."""
    if cap is not None:
        cap.lift()
    family, entry, frame = cases.case(number)
    if cap is not None:
        cap.fit(len(frame))
    try:
        entry.enter(frame)
    except REFUSED:
        return family, "refused", ""
    except Exception as error:
        return family, "found", f"{entry.name}: {type(error).__name__}: {error}"
    return family, "read", ""


def _run(cases: Cases, first: int, stop: int, here: mmap.mmap, cap: Cap) -> int:
    said = time.monotonic()
    seen = _nothing(cases)
    findings = 0
    for number in range(first, stop):
        struct.pack_into("<q", here, 0, number)
        family, what, finding = _hand_in(cases, number, cap)
        seen[cases.families[family].name][what] += 1
        if finding:
            findings += 1
            _say({"case": number, "finding": finding})
            if findings == _MOST_FINDINGS:
                break
        if not number % 64 and time.monotonic() - said > _TELL:
            said = time.monotonic()
            _say({"seen": seen})
            seen = _nothing(cases)
    struct.pack_into("<q", here, 0, stop)
    _say({"seen": seen})
    return 0


def _nothing(cases: Cases) -> dict[str, dict[str, int]]:
    return {family.name: {"read": 0, "refused": 0, "found": 0} for family in cases.families}


def _say(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
