"""Connections of this process: found, counted when they are gone, and ended from outside."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from gradsieve.comm import sockets

Pair = tuple[socket.socket, socket.socket, int]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Two ends, and the port of one of them."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as one:
            other, _ = server.accept()
            with other:
                yield one, other, port


def test_connections_are_found_but_for_those_of_a_port(
    pair: Pair,
) -> None:
    one, other, port = pair
    assert {one.fileno(), other.fileno()} <= sockets.connected(except_on=0).keys()
    assert not {one.fileno(), other.fileno()} & sockets.connected(except_on=port).keys()
    assert sockets.listens_on(port)
    assert not sockets.listens_on(one.getsockname()[1])


def test_whoever_waits_at_either_end_is_woken(pair: Pair) -> None:
    one, other, _ = pair
    ours = {one.fileno(): sockets.connected(0)[one.fileno()]}
    assert sockets.lost(ours) == 0
    sockets.shut(ours)
    assert one.recv(1) == other.recv(1) == b""
    assert sockets.lost(ours) == 1


def test_a_descriptor_that_is_another_connection_by_now_is_left_alone(
    pair: Pair,
) -> None:
    one, other, _ = pair
    before = {one.fileno(): sockets.connected(0)[one.fileno()] + 1}
    sockets.shut(before)
    one.sendall(b"x")
    assert other.recv(1) == b"x"
    assert sockets.lost(before) == 1


def test_a_peer_that_closed_is_gone(pair: Pair) -> None:
    one, other, _ = pair
    ours = {one.fileno(): sockets.connected(0)[one.fileno()]}
    other.close()
    one.recv(1)
    assert sockets.lost(ours) == 1


def test_looking_leaves_no_descriptor_open(pair: Pair) -> None:
    before = len(os.listdir("/proc/self/fd"))
    sockets.lost(sockets.connected(0))
    sockets.listens_on(1)
    assert len(os.listdir("/proc/self/fd")) == before
