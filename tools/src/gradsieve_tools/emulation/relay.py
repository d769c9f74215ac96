"""The switches of a lab with delay, where the kernel has no netem: a TUN a port, packets in user space.

Started by network.py inside the switches' namespace. It reads its settings from stdin as JSON, makes the TUN
devices port0, port1, ..., says "ready", and carries each packet over the lines that lead to its destination:

    ports   how many hosts' ports there are
    lines   [bit/s (0 is no limit), delay in seconds], one for each direction of a link
    routes  [port, destination address, port of the receiver, numbers of the lines on the way]
    queue   seconds for which a packet may wait for a line

A packet enters a line when it has come out of the one before, so that the first to come goes first, however
long the others have been in flight. Standard library only.
"""

import contextlib
import fcntl
import gc
import json
import os
import socket
import struct
import sys
from heapq import heappop, heappush
from select import select
from time import monotonic

_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
_TUN_F_CSUM, _TUN_F_TSO4 = 0x01, 0x02

# The virtio header before each packet tells how TCP's bundle of frames is to be split. Passed on unread, it
# lets bundles of up to 64 kB cross whole: MTU 1500 as on veth, at several times the speed of single frames.
_VIRTIO_HEADER = 10
_DESTINATION = slice(_VIRTIO_HEADER + 16, _VIRTIO_HEADER + 20)
_LARGEST_PACKET = _VIRTIO_HEADER + 65_536

_READS_A_TURN = 16
_MOST_BYTES_HELD = 256 << 20


def open_tun(name: str) -> int:
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    flags = _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR
    fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
    fcntl.ioctl(tun, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO4)
    return tun


Route = tuple[int, tuple[int, ...]]  # the receiver's port, and the lines on the way


class Relay:
    """Holds packets until their time. `free[i]` is when line i has sent all it was given."""

    def __init__(
        self,
        tuns: list[int],
        lines: list[tuple[float, float]],
        routes: dict[tuple[int, bytes], Route],
        queue: float,
    ) -> None:
        self.tuns = tuns
        self.seconds_per_byte = [8 / rate if rate else 0.0 for rate, _ in lines]
        self.delays = [delay for _, delay in lines]
        self.routes = routes
        self.queue = queue
        self.free = [0.0] * len(lines)
        self.held: list[tuple[float, int, Route, bytes]] = []
        self.bytes_held = 0
        self.accepted = 0

    def accept(self, port: int, packet: bytes, now: float) -> None:
        """Take one packet from a sender; one for an unknown address is dropped."""
        route = self.routes.get((port, packet[_DESTINATION]))
        if route is not None and self.bytes_held <= _MOST_BYTES_HELD:
            self.bytes_held += len(packet)
            self.forward(route, packet, now)

    def forward(self, route: Route, packet: bytes, now: float) -> None:
        """Into the next line, or to its receiver: give it its time, or drop it as a full queue would."""
        receiver, lines = route
        due = now
        if lines:
            start = max(now, self.free[lines[0]])
            if start - now > self.queue:
                self.bytes_held -= len(packet)
                return
            self.free[lines[0]] = start + len(packet) * self.seconds_per_byte[lines[0]]
            due = self.free[lines[0]] + self.delays[lines[0]]
        self.accepted += 1  # keeps packets of one instant in their order
        heappush(self.held, (due, self.accepted, (receiver, lines[1:]), packet))

    def deliver(self, now: float) -> None:
        while self.held and self.held[0][0] <= now:
            due, _, route, packet = heappop(self.held)
            if route[1]:
                self.forward(route, packet, due)
                continue
            self.bytes_held -= len(packet)
            # A host whose device is down loses its packets, as it would on a real link.
            with contextlib.suppress(OSError):
                os.write(self.tuns[route[0]], packet)

    def run(self) -> None:
        ports = {tun: port for port, tun in enumerate(self.tuns)}
        while True:
            wait = max(0.0, self.held[0][0] - monotonic()) if self.held else None
            readable, _, _ = select(self.tuns, [], [], wait)
            for tun in readable:
                port = ports[tun]
                # Bounded, so that one busy sender cannot make the packets of others late.
                for _ in range(_READS_A_TURN):
                    try:
                        packet = os.read(tun, _LARGEST_PACKET)
                    except BlockingIOError:
                        break
                    self.accept(port, packet, monotonic())
            self.deliver(monotonic())


def main() -> None:
    settings = json.load(sys.stdin)
    # The ranks' computation must not make packets late; where this is not allowed, it will.
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    gc.disable()  # nothing here forms cycles, and a collection would stop the network
    routes = {
        (port, socket.inet_aton(address)): (receiver, tuple(lines))
        for port, address, receiver, lines in settings["routes"]
    }
    tuns = [open_tun(f"port{i}") for i in range(settings["ports"])]
    relay = Relay(tuns, [(rate, delay) for rate, delay in settings["lines"]], routes, settings["queue"])
    print("ready", flush=True)
    relay.run()


if __name__ == "__main__":
    main()
