"""Hosts, switch and links, as lines for `ip` and `tc`.

Without delay, or where the kernel has netem:

    host 0                       switches (a namespace of their own)                     host 1
    eth0 [queue] --veth--- [queue] port0  ---  bridge  ---  port1 [queue] ---veth--- [queue] eth0

Each end of a link has a queue, tbf for a rate and netem for a delay; links between bridges are the same.

With delay, where the kernel has no netem:

    eth0 [tbf] ---TUN---  relay: waits for each line on the way and its delay  ---TUN--- [tbf] eth0

No interface of the lab is ever in the machine's own namespace and no host has a default route, so no packet
can leave the machine.
"""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from socket import gethostname

from gradsieve_tools.emulation import names, namespaces, quotas, tools
from gradsieve_tools.emulation.topology import Link, Port, Topology
from gradsieve_tools.errors import LabError

_FRAME = 1514
_LARGEST_BUNDLE = 65_536
_QUEUE_SECONDS = 0.1  # a packet that waits longer than this for a link is dropped


@dataclass(frozen=True)
class Network:
    pid: int
    topology: Topology

    @property
    def hosts(self) -> list[str]:
        return [names.host_name(self.pid, i) for i in range(len(self.topology.hosts))]

    @property
    def switch(self) -> str:
        """The namespace of all switches."""
        return names.switch_name(self.pid)

    @property
    def quotas(self) -> dict[str, float]:
        hosts = zip(self.hosts, self.topology.hosts, strict=True)
        return {name: host.cpus for name, host in hosts if host.cpus is not None}


def build(network: Network) -> subprocess.Popen[bytes] | None:
    """Build it all; returns the relay, if the links needed one."""
    topology = network.topology
    namespaces.create({network.switch: "", **_hosts_files(network)})
    quotas.create(network.quotas)
    is_delayed = any(link.delay for link in topology.links)
    is_relayed = is_delayed and not _kernel_has_netem(network.switch)
    relay = None
    if is_relayed:
        relay = _start_relay(network)
        tools.ip(tun_lines(network), namespace=network.switch)
    else:
        tools.ip(veth_lines(network))
        tools.ip(switch_lines(topology), namespace=network.switch)
        tools.tc(switch_egress_lines(topology), namespace=network.switch)
    for number, name in enumerate(network.hosts):
        ports = [port for port in topology.ports if port.host == number]
        tools.ip(host_lines(topology, ports), namespace=name)
        tools.tc(host_egress_lines(topology, ports, is_relayed), namespace=name)
    return relay


def veth_lines(network: Network) -> Iterator[str]:
    """A link from a host ends at portN, N its number; one between switches begins at farN."""
    for port in network.topology.ports:
        near = f"port{port.link} netns {network.switch}"
        yield f"link add {near} type veth peer name {port.interface} netns {network.hosts[port.host]}"
    for number in _between_switches(network.topology):
        ends = f"port{number} netns {network.switch} type veth peer name far{number} netns {network.switch}"
        yield f"link add {ends}"


def tun_lines(network: Network) -> list[str]:
    return [
        f"link set port{i} netns {network.hosts[port.host]} name {port.interface}"
        for i, port in enumerate(network.topology.ports)
    ]


def switch_lines(topology: Topology) -> Iterator[str]:
    for i in range(len(topology.switches)):
        yield f"link add switch{i} type bridge mcast_snooping 0"
        yield f"link set switch{i} addrgenmode none up"
    for device, switch, _ in _switch_ports(topology):
        yield f"link set {device} master switch{topology.switches.index(switch)} addrgenmode none up"


def switch_egress_lines(topology: Topology) -> list[str]:
    return [line for device, _, link in _switch_ports(topology) for line in egress(device, link)]


def host_lines(topology: Topology, ports: list[Port]) -> Iterator[str]:
    # addrgenmode none: a link-local IPv6 address would be a second address for gloo to choose from.
    # txqueuelen: a TUN drops what its reader has not fetched, and the default is 500 packets.
    yield "link set lo up"
    for port in ports:
        # Of the slowest link there: a bundle must fit into the burst of every link on its way.
        rate = topology.slowest(port.network)
        bundle = _LARGEST_BUNDLE if rate is None else bundle_bytes(rate)
        device = port.interface
        yield f"link set {device} txqueuelen 10000 gso_max_size {bundle} addrgenmode none up"
        yield f"address add {port.address}/24 dev {device}"


def host_egress_lines(topology: Topology, ports: list[Port], is_relayed: bool) -> list[str]:
    """A relay delays by itself; what a host sends it is shaped by the host's own queue."""
    found = ((port.interface, topology.links[port.link]) for port in ports)
    shaped = ((device, Link(*link.ends, link.rate) if is_relayed else link) for device, link in found)
    return [line for device, link in shaped for line in egress(device, link)]


def egress(device: str, link: Link) -> list[str]:
    """Set how fast packets leave into a link, and when they arrive; the same at both ends."""
    if link.delay is not None:
        return [f"qdisc add dev {device} root {netem(link.rate, link.delay)}"]
    return [] if link.rate is None else [f"qdisc add dev {device} root {tbf(link.rate)}"]


def relay_settings(topology: Topology) -> dict[str, object]:
    """Return lines, two a link, and routes for the relay. A host's own queue shapes its line."""
    lines = []
    for link in topology.links:
        delay, is_hosts = link.delay or 0.0, link.start not in topology.switches
        lines += [[0 if is_hosts else link.rate or 0, delay], [link.rate or 0, delay]]
    ports = topology.ports
    number = {port: i for i, port in enumerate(ports)}
    routes = [
        [number[source], target.address, number[target], [2 * link + (not forward) for link, forward in way]]
        for source in ports
        for target, way in topology.ways(source)
    ]
    return {"ports": len(ports), "lines": lines, "routes": routes, "queue": _QUEUE_SECONDS}


def _between_switches(topology: Topology) -> list[int]:
    return [number for number, link in enumerate(topology.links) if link.start in topology.switches]


def _switch_ports(topology: Topology) -> Iterator[tuple[str, str, Link]]:
    """Device, switch and link of every end of a link that is at a switch."""
    for number, link in enumerate(topology.links):
        yield f"port{number}", link.end, link
    for number in _between_switches(topology):
        yield f"far{number}", topology.links[number].start, topology.links[number]


def burst_bytes(rate: int) -> int:
    """Return a burst of 0.4 ms, at least four frames: a larger one makes short messages free, a smaller one
    costs throughput."""
    return max(rate // 8 // 2500, 4 * _FRAME)


def bundle_bytes(rate: int) -> int:
    """The most that TCP may hand down as one bundle of frames.

    Less than a burst, so that tbf never splits one: splitting tripled the time of a 1 Gbit/s all-reduce.
    """
    return min(burst_bytes(rate) * 2 // 3, _LARGEST_BUNDLE)


def tbf(rate: int) -> str:
    return f"tbf rate {rate}bit burst {burst_bytes(rate)} latency {round(_QUEUE_SECONDS * 1000)}ms"


def netem(rate: int | None, delay: float) -> str:
    """Delay and rate as one queue discipline; its queue holds the packets in flight and those waiting."""
    line = f"netem delay {round(delay * 1e6)}us"
    if rate is None:
        return f"{line} limit 1000000"
    packets = round(rate / 8 * (delay + _QUEUE_SECONDS) / _FRAME)
    return f"{line} rate {rate}bit limit {max(packets, 1000)}"


def _hosts_files(network: Network) -> dict[str, str]:
    # The machine's own name must lead to the lab's address, for libraries look themselves up by it; the
    # IPv6 form of each address to its name, for torch's store looks its clients up and warns if it cannot.
    topology = network.topology
    everyone = "".join(f"{a} {name}\n::ffff:{a} {name}\n" for a, name in _names(topology))
    return {
        name: f"127.0.0.1 localhost\n{address} {gethostname()}\n{everyone}"
        for name, address in zip(network.hosts, topology.addresses, strict=True)
    }


def _names(topology: Topology) -> Iterator[tuple[str, str]]:
    for port in topology.ports:
        name = topology.hosts[port.host].name
        yield port.address, name if port.interface == "eth0" else f"{name}-{port.interface}"


def _kernel_has_netem(namespace: str) -> bool:
    trial = ["qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"]
    return tools.run([tools.path_of("tc"), "-netns", namespace, *trial]).returncode == 0


def _start_relay(network: Network) -> subprocess.Popen[bytes]:
    # A file of the standard library alone, run as such: no site-packages, so that it starts at once.
    program = [sys.executable, "-I", "-S", str(Path(__file__).with_name("relay.py"))]
    relay = subprocess.Popen(
        namespaces.entering(network.switch, program),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert relay.stdin is not None
    assert relay.stdout is not None
    with relay.stdout as answer:
        with contextlib.suppress(BrokenPipeError), relay.stdin as settings:
            settings.write(json.dumps(relay_settings(network.topology)).encode())
        is_ready = answer.readline() == b"ready\n"
    if not is_ready:
        relay.wait()
        raise LabError(
            "the relay that delays packets did not start; its error stands above. It needs /dev/net/tun"
        )
    return relay
