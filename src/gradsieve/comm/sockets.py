"""Connections of this process that a process group opened, found so that they can be ended.

A rank that waits in a gloo collective for a rank that has failed as well would wait for its time-out: torch
can neither interrupt the collective (`abort()` of a gloo group does nothing to it, torch 2.13) nor end the
group before. Its connections can be ended from another thread, and the collective ends with them.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable

_ESTABLISHED = 1  # the first byte of the kernel's `tcp_info`
Sockets = dict[int, int]  # inodes by file descriptor


def connected(except_on: int) -> Sockets:
    """Return the TCP connections of this process, but for those with this port at one of their ends; none on
    other systems than Linux."""

    def is_wanted(one: socket.socket) -> bool:
        if one.type != socket.SOCK_STREAM or one.family not in (socket.AF_INET, socket.AF_INET6):
            return False
        return except_on not in (one.getsockname()[1], one.getpeername()[1])

    return {fd: inode for fd, inode in _all().items() if _ask(fd, is_wanted)}


def listens_on(port: int) -> bool:
    """Say whether this process listens on the port."""

    def does(one: socket.socket) -> bool:
        is_listening = bool(one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
        return is_listening and one.getsockname()[1:2] == (port,)

    return any(_ask(fd, does) for fd in _all())


def lost(sockets: Sockets) -> int:
    """Return how many are no longer connections, because either end has closed them."""

    def is_alive(one: socket.socket) -> bool:
        return one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _ESTABLISHED

    return sum(_inode(fd) != inode or not _ask(fd, is_alive) for fd, inode in sockets.items())


def shut(sockets: Sockets) -> None:
    """End those that are still the same; descriptors stay their owner's, who sees the connections end."""
    for fd, inode in sockets.items():
        if _inode(fd) == inode:
            _ask(fd, lambda one: one.shutdown(socket.SHUT_RDWR))


def _all() -> Sockets:
    with contextlib.suppress(OSError):
        descriptors = map(int, os.listdir("/proc/self/fd"))
        return {fd: inode for fd in descriptors if (inode := _inode(fd))}
    return {}


def _inode(fd: int) -> int:
    """Return the inode of a socket; 0 for other descriptors."""
    with contextlib.suppress(OSError):
        link = os.readlink(f"/proc/self/fd/{fd}")
        if link.startswith("socket:["):
            return int(link[len("socket:[") : -1])
    return 0


def _ask(fd: int, question: Callable[[socket.socket], bool | None]) -> bool:
    """Ask a copy of the descriptor; False if it is no socket, or one that cannot answer."""
    with contextlib.suppress(OSError):
        copy = os.dup(fd)
        try:
            one = socket.socket(fileno=copy)
        except OSError:
            os.close(copy)
            raise
        with one:
            return bool(question(one))
    return False
