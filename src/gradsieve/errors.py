"""All errors that gradsieve raises.

    GradsieveError
    |-- ConfigError        a setting that cannot work; raised before training starts
    |-- ProtocolError      ranks disagree about what to do
    |   |-- MismatchError      one rank asked for another collective than its peers
    |   `-- DivergenceError    replicas are no longer bit-identical
    |-- Malformed          bytes from a peer or a file failed their check; nothing was applied
    |   `-- RefusedError       a save or load that a rank could not do, so that none did; training can go on
    `-- PeerError          a collective failed or timed out; nothing of the step was kept

Each message names the rank, the step, the cause and, where there is one, the fix.
"""

from collections.abc import Sequence


class GradsieveError(Exception):
    """Base of every error raised by gradsieve."""


class ConfigError(GradsieveError, ValueError):
    """A setting that cannot work."""


class ProtocolError(GradsieveError, RuntimeError):
    """Ranks disagree about what to do."""


class MismatchError(ProtocolError):
    """One rank asked for another collective than its peers."""


class DivergenceError(ProtocolError):
    """Replicas are no longer bit-identical."""


class Malformed(GradsieveError, ValueError):  # noqa: N818 - "Malformed message" reads as what it is
    """Bytes from a peer or a file failed their check."""


class RefusedError(Malformed, MismatchError):
    """A rank could not save or load, and therefore none did. All ranks raise this error, and can go on."""


class PeerError(GradsieveError, RuntimeError):
    """A collective failed or timed out."""

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks  # to blame, the same on all survivors; empty if they could not find out


def printable(content: bytes | str) -> str:
    """Return what a peer or a file wrote, for a message, without what a terminal would obey."""
    text = content.decode(errors="replace") if isinstance(content, bytes) else content
    return "".join(c for c in text if c.isprintable())


def list_ranks(ranks: Sequence[int]) -> str:
    """Name ranks in a message."""
    some = ", ".join(str(rank) for rank in ranks[:8]) + (", ..." if len(ranks) > 8 else "")
    return f"rank {some}" if len(ranks) == 1 else f"ranks {some}"
