"""Names of namespaces: `gs4242-0` is host 0 of the lab that process 4242 runs, `gs4242-sw` its switch.

The process id in the name is what lets a later lab tell a dead lab's remains from a living one's hosts.
"""

import re

from gradsieve_tools.errors import LabError

_ALLOWED = re.compile(r"[a-z0-9-]{1,12}")
_OURS = re.compile(r"gs([1-9][0-9]{0,6})-(?:sw|[0-9]{1,2})")


def host_name(pid: int, index: int) -> str:
    return checked(f"gs{pid}-{index}")


def switch_name(pid: int) -> str:
    return checked(f"gs{pid}-sw")


def owner_of(name: str) -> int | None:
    """The process whose lab made this namespace; None if no lab did."""
    match = _OURS.fullmatch(name)
    return int(match[1]) if match else None


def checked(name: str) -> str:
    """`name`, once it is sure to be one plain word: it becomes a path and a word in a batch of `ip`."""
    if _ALLOWED.fullmatch(name) is None:
        raise LabError(f"{name!r} cannot name a namespace: only a-z, 0-9 and '-', at most 12 characters")
    return name
