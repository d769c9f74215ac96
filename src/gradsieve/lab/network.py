"""Hosts, switch and links, as lines for `ip` and `tc`.

Without delay, or where the kernel has netem:

    host 0                        switch (a namespace of its own)                     host 1
    eth0 [netem or tbf] --veth--- port0 [tbf]  ---  bridge  ---  [tbf] port1 ---veth--- [netem or tbf] eth0

With delay, where the kernel has no netem:

    eth0 [tbf] ---TUN---  relay: waits for the receiver's line, then for the delay  ---TUN--- [tbf] eth0

No interface of the lab is ever in the machine's own namespace and no host has a default route, so no packet
can leave the machine.
"""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from socket import gethostname

from gradsieve.errors import LabError
from gradsieve.lab import names, namespaces, tools

# RFC 2544 sets 198.18.0.0/15 aside for benchmarks: no real network answers there.
_SUBNET = "198.18.0"
_FRAME = 1514
_LARGEST_BUNDLE = 65_536
_QUEUE_SECONDS = 0.1  # what waits longer than this for a link is dropped


@dataclass(frozen=True)
class Network:
    """What to build. `rate` is in bit/s, `delay` in seconds one way; None is as fast as the machine goes."""

    pid: int
    size: int
    rate: int | None
    delay: float | None

    @property
    def hosts(self) -> list[str]:
        return [names.host_name(self.pid, i) for i in range(self.size)]

    @property
    def switch(self) -> str:
        return names.switch_name(self.pid)

    @property
    def addresses(self) -> list[str]:
        return [f"{_SUBNET}.{i + 1}" for i in range(self.size)]


def build(network: Network) -> subprocess.Popen[bytes] | None:
    """Build it all; returns the relay, if the links needed one."""
    namespaces.create({network.switch: "", **_hosts_files(network)})
    if network.delay is None or _kernel_has_netem(network.switch):
        relay = None
        egress = host_egress(network.rate, network.delay)
        tools.ip(veth_lines(network))
        tools.ip(switch_lines(network), namespace=network.switch)
        tools.tc(switch_egress_lines(network), namespace=network.switch)
    else:
        relay = _start_relay(network)
        egress = host_egress(network.rate, None)
        tools.ip(tun_lines(network), namespace=network.switch)
    for host, address in zip(network.hosts, network.addresses, strict=True):
        tools.ip(host_lines(address, network.rate), namespace=host)
        tools.tc(egress, namespace=host)
    return relay


def veth_lines(network: Network) -> list[str]:
    return [
        f"link add port{i} netns {network.switch} type veth peer name eth0 netns {host}"
        for i, host in enumerate(network.hosts)
    ]


def tun_lines(network: Network) -> list[str]:
    return [f"link set port{i} netns {host} name eth0" for i, host in enumerate(network.hosts)]


def switch_lines(network: Network) -> list[str]:
    bridge = ["link add switch type bridge mcast_snooping 0", "link set switch addrgenmode none up"]
    return bridge + [f"link set port{i} master switch addrgenmode none up" for i in range(network.size)]


def switch_egress_lines(network: Network) -> list[str]:
    if network.rate is None:
        return []
    return [f"qdisc add dev port{i} root {tbf(network.rate)}" for i in range(network.size)]


def host_lines(address: str, rate: int | None) -> list[str]:
    # addrgenmode none: a link-local IPv6 address would be a second address for gloo to choose from.
    # txqueuelen: a TUN drops what its reader has not fetched, and the default is 500 packets.
    bundle = _LARGEST_BUNDLE if rate is None else bundle_bytes(rate)
    return [
        "link set lo up",
        f"link set eth0 txqueuelen 10000 gso_max_size {bundle} addrgenmode none up",
        f"address add {address}/24 dev eth0",
    ]


def host_egress(rate: int | None, delay: float | None) -> list[str]:
    if delay is not None:
        return [f"qdisc add dev eth0 root {netem(rate, delay)}"]
    return [] if rate is None else [f"qdisc add dev eth0 root {tbf(rate)}"]


def burst_bytes(rate: int) -> int:
    """What a link that was idle may send at once, above its rate: 0.4 ms of its line, at least four frames.

    A larger burst makes short messages free (with 256 kB, 200 kB cross an idle 100 Mbit/s link in 0.5 ms
    instead of 16); a smaller one costs throughput, for the kernel wakes too late or in too small portions.
    """
    return max(rate // 8 // 2500, 4 * _FRAME)


def bundle_bytes(rate: int) -> int:
    """The most that TCP may hand down as one bundle of frames.

    Less than a burst, so that tbf never splits one: splitting tripled the time of a 1 Gbit/s all-reduce.
    """
    return min(burst_bytes(rate) * 2 // 3, _LARGEST_BUNDLE)


def tbf(rate: int) -> str:
    return f"tbf rate {rate}bit burst {burst_bytes(rate)} latency {round(_QUEUE_SECONDS * 1000)}ms"


def netem(rate: int | None, delay: float) -> str:
    """Delay and rate as one queue discipline; its queue holds the packets under way and those waiting."""
    line = f"netem delay {round(delay * 1e6)}us"
    if rate is None:
        return f"{line} limit 1000000"
    packets = round(rate / 8 * (delay + _QUEUE_SECONDS) / _FRAME)
    return f"{line} rate {rate}bit limit {max(packets, 1000)}"


def _hosts_files(network: Network) -> dict[str, str]:
    # The machine's own name must lead to the lab's address, for libraries look themselves up by it; the
    # IPv6 form of each address to its name, for torch's store looks its clients up and warns if it cannot.
    everyone = "".join(
        f"{address} host{i}\n::ffff:{address} host{i}\n" for i, address in enumerate(network.addresses)
    )
    return {
        host: f"127.0.0.1 localhost\n{address} {gethostname()}\n{everyone}"
        for host, address in zip(network.hosts, network.addresses, strict=True)
    }


def _kernel_has_netem(namespace: str) -> bool:
    trial = ["qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"]
    return tools.run([tools.path_of("tc"), "-netns", namespace, *trial]).returncode == 0


def _start_relay(network: Network) -> subprocess.Popen[bytes]:
    # Run as a file, not as a module: importing the gradsieve package would import torch.
    program = [sys.executable, "-I", "-S", str(Path(__file__).with_name("relay.py"))]
    settings = [str(network.size), str(network.delay), str(network.rate or 0), str(_QUEUE_SECONDS)]
    relay = subprocess.Popen(
        namespaces.entering(network.switch, [*program, *settings]),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert relay.stdout is not None
    with relay.stdout as answer:
        is_ready = answer.readline() == b"ready\n"
    if not is_ready:
        relay.wait()
        raise LabError(
            "the relay that delays packets did not start; its error stands above. It needs /dev/net/tun"
        )
    return relay
