"""A process of the fuzzer whose doors do what none may: `test_fuzz.py` sees whether that is found."""

from __future__ import annotations

import os
import sys
import time

import numpy as np

from gradsieve.errors import Malformed
from gradsieve_tools.fuzz import targets, worker
from gradsieve_tools.fuzz.entry_points.entry_point import EntryPoint

HANGS = 6
"""What number 6 does: the last, so that no process has to go on after it."""
LARGE = (1, 5)
"""Messages of which a copy is more than what may be taken beside them."""


def enter(forged: bytearray) -> None:
    match forged[0]:
        case 1:
            copies = [bytes(forged) for _ in range(2)]
            raise Malformed(f"no, {len(copies)} times")
        case 2:
            raise IndexError("out of range")
        case 3:
            np.ones(8 << 20, np.uint8)
        case 4:
            os.abort()
        case 5:
            _ = [bytes(forged) for _ in range(3)]
        case 6:
            time.sleep(60)


class Scripted(targets.Cases):
    """Message n does what stands at place n; the warm-up does nothing."""

    def case(self, number: int) -> tuple[int, EntryPoint, bytearray]:
        content = bytearray(4 << 20 if number in LARGE else 1)
        content[0] = number if number <= HANGS else 0
        return 0, self.entries[0][0], content


if __name__ == "__main__":
    harmless = EntryPoint("it", (b"\0",), (), enter)
    targets.TARGETS["faulty"] = (
        targets.Family("faulty", 1.0, lambda: [harmless], lambda source, entry: bytearray(1)),
    )
    worker.Cases = Scripted  # type: ignore[misc]
    sys.exit(worker.main("faulty", "0", *sys.argv[1:]))
