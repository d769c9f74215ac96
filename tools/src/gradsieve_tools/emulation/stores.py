"""The store of the ranks' rendezvous, where only those of one address find it."""

from __future__ import annotations

import socket

from torch.distributed import TCPStore


def store_at(host: str, port: int = 0) -> TCPStore:
    """Start a store on a bound socket: torch's own server would listen at every address of the machine."""
    with socket.socket() as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # one before may have ended just now
        bound.bind((host, port))
        bound.listen()
        port = bound.getsockname()[1]
        # The store closes it.
        listening = bound.detach()
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening)
