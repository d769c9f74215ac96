"""An entry point: a place where bytes of others come in, with messages as honest ranks send them.

Whatever is handed to `enter`, it returns having checked that what it read is lawful, or raises one of
REFUSED. Anything else is a finding: another exception, a crash, a hang, memory beyond the limit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gradsieve.errors import Malformed, ProtocolError
from gradsieve.types import Host

REFUSED = (Malformed, ProtocolError)  # ProtocolError: a peer states other settings than this rank


@dataclass(frozen=True)
class EntryPoint:
    name: str
    # valid messages: the first is altered, the others lend parts, as a replay would
    honest: tuple[bytes, ...]
    edges: tuple[int, ...]  # numbers around which a check should change its verdict: lengths, counts
    enter: Callable[[bytearray], None]


def check_rising(indices: Host, n: int) -> None:
    if len(indices) and (indices[0] < 0 or indices[-1] >= n or not (indices[1:] > indices[:-1]).all()):
        raise AssertionError("indices that are not sorted, unique and inside")
