"""Connections of this process that a process group opened, found so that they can be ended.

A rank that waits in a gloo collective for a rank that has failed as well would wait for its time-out: torch
can neither interrupt the collective (`abort()` of a gloo group does nothing to it, torch 2.13) nor end the
group before. Its connections can be ended, and the collective with them, at once, from another thread.
"""

from __future__ import annotations

import contextlib
import os
import socket

_ESTABLISHED = 1
"""The first byte of the kernel's `tcp_info`."""
Sockets = dict[int, int]
"""Inodes by file descriptor."""


def connected(except_on: int) -> Sockets:
    """TCP connections of this process, but for those with this port at one of their ends; none on other
    systems than Linux."""
    found = {}
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                fd = int(name)
                link = os.readlink(f"/proc/self/fd/{name}")
                if link.startswith("socket:[") and _is_connection(fd, except_on):
                    found[fd] = int(link[len("socket:[") : -1])
    return found


def own_address(fd: int) -> str:
    """Of this end of a connection; empty where it is none any more."""
    with contextlib.suppress(OSError), _opened(fd) as one:
        return str(one.getsockname()[0]).removeprefix("::ffff:")
    return ""


def listens_on(port: int) -> bool:
    """Whether this process does."""
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError), _opened(int(name)) as one:
                is_listening = one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if is_listening and one.getsockname()[1:2] == (port,):
                    return True
    return False


def gone(sockets: Sockets) -> int:
    """How many are no longer connections, because either end has closed them."""
    return sum(not _is_established(fd, inode) for fd, inode in sockets.items())


def shut(sockets: Sockets) -> None:
    """End those that are still the same; their descriptors stay their owner's, who sees them end."""
    for fd, inode in sockets.items():
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{fd}") == f"socket:[{inode}]":
                with _opened(fd) as one:
                    one.shutdown(socket.SHUT_RDWR)


def _is_connection(fd: int, except_on: int) -> bool:
    with _opened(fd) as one:
        if one.type != socket.SOCK_STREAM or one.family not in (socket.AF_INET, socket.AF_INET6):
            return False
        return except_on not in (one.getsockname()[1], one.getpeername()[1])


def _is_established(fd: int, inode: int) -> bool:
    with contextlib.suppress(OSError):
        if os.readlink(f"/proc/self/fd/{fd}") == f"socket:[{inode}]":
            with _opened(fd) as one:
                state = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
                return state == _ESTABLISHED
    return False


def _opened(fd: int) -> socket.socket:
    """On a descriptor of its own; OSError where there is no socket."""
    copy = os.dup(fd)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
