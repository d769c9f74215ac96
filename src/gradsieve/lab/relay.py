"""The switch of a lab with delay, where the kernel has no netem: one TUN a host, packets held in user space.

    python relay.py HOSTS DELAY RATE QUEUE

DELAY is in seconds one way, RATE in bit/s toward each receiver (0 is no limit), QUEUE in seconds of waiting.

Started by network.py inside the switch's namespace. It makes the TUN devices port0, port1, ..., says "ready",
and from then on carries each packet to the host its destination address names. Standard library only.
"""

import contextlib
import fcntl
import gc
import os
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
_SUBNET = bytes([198, 18, 0])
_LARGEST_PACKET = _VIRTIO_HEADER + 65_536

_READS_A_TURN = 16
_MOST_BYTES_HELD = 256 << 20


def open_tun(name: str) -> int:
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    flags = _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR
    fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
    fcntl.ioctl(tun, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO4)
    return tun


class Relay:
    """Holds packets until their time. `free[i]` is when the line to host i has sent all it was given."""

    def __init__(self, tuns: list[int], delay: float, rate: int, queue: float) -> None:
        self.tuns = tuns
        self.delay = delay
        self.seconds_per_byte = 8 / rate if rate else 0.0
        self.queue = queue
        self.free = [0.0] * len(tuns)
        self.held: list[tuple[float, int, int, bytes]] = []
        self.bytes_held = 0
        self.accepted = 0

    def accept(self, packet: bytes, now: float) -> None:
        """Take one packet from a sender: give it its time of arrival, or drop it as a full queue would."""
        destination = packet[_DESTINATION]
        receiver = destination[-1] - 1 if destination[:-1] == _SUBNET else -1
        if not 0 <= receiver < len(self.tuns) or self.bytes_held > _MOST_BYTES_HELD:
            return
        start = max(now, self.free[receiver])
        if start - now > self.queue:
            return
        self.free[receiver] = start + len(packet) * self.seconds_per_byte
        self.accepted += 1  # keeps packets of one instant in their order
        heappush(self.held, (self.free[receiver] + self.delay, self.accepted, receiver, packet))
        self.bytes_held += len(packet)

    def deliver(self, now: float) -> None:
        while self.held and self.held[0][0] <= now:
            _, _, receiver, packet = heappop(self.held)
            self.bytes_held -= len(packet)
            # A host whose device is down loses its packets, as it would on a real link.
            with contextlib.suppress(OSError):
                os.write(self.tuns[receiver], packet)

    def run(self) -> None:
        while True:
            wait = max(0.0, self.held[0][0] - monotonic()) if self.held else None
            readable, _, _ = select(self.tuns, [], [], wait)
            for tun in readable:
                # Bounded, so that one busy sender cannot make the packets of others late.
                for _ in range(_READS_A_TURN):
                    try:
                        packet = os.read(tun, _LARGEST_PACKET)
                    except BlockingIOError:
                        break
                    self.accept(packet, monotonic())
            self.deliver(monotonic())


def main() -> None:
    hosts, delay, rate, queue = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
    # The ranks' computation must not make packets late; where this is not allowed, it will.
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    gc.disable()  # nothing here forms cycles, and a collection would stop the network
    relay = Relay([open_tun(f"port{i}") for i in range(hosts)], delay, rate, queue)
    print("ready", flush=True)
    relay.run()


if __name__ == "__main__":
    main()
