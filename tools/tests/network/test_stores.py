"""A store of the lab is there for its own address alone."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest
from torch.distributed import TCPStore

from gradsieve_tools.emulation.stores import store_at


def at_every_address(host: str) -> TCPStore:
    return TCPStore(host, 0, is_master=True, wait_for_workers=False)


@pytest.mark.parametrize(("make", "is_found"), [(store_at, False), (at_every_address, True)])
def test_nobody_finds_it_elsewhere(make: Callable[[str], TCPStore], is_found: bool) -> None:
    """127.0.0.2 is another address of the same machine."""
    store = make("127.0.0.1")
    client = TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
    client.set("key", "value")
    assert store.get("key") == b"value"
    with socket.socket() as stranger:
        assert (stranger.connect_ex(("127.0.0.2", store.port)) == 0) == is_found
