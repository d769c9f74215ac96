"""Which hosts, switches and links a lab has: from a file, or the plain star.

    switches = ["rack", "office"]

    [hosts]                                 # ranks in this order
    ant = {}
    bee = { cpus = 0.5 }                    # processors that it may use at most
    cat = { gloo_interface = "eth1" }       # what GLOO_SOCKET_IFNAME says there; eth0 otherwise

    [[links]]
    from = ["ant", "bee", "cat"]            # a link from each of these
    to = "rack"
    rate = "1gbit"                          # both ways; without it, as fast as the machine goes
    delay = "2ms"                           # one way; without it, none

A host's first link is its eth0, the next its eth1. Switches joined by links are one network with addresses of
its own; they form a tree, for nothing here would stop a packet that goes round. All hosts reach each other
over eth0.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from gradsieve.errors import ConfigError
from gradsieve_tools.documents import Table, open_document
from gradsieve_tools.emulation.units import parse_delay, parse_rate

MOST_HOSTS = 64
MOST_SWITCHES = 64
LEAST_CPUS, MOST_CPUS = 0.05, 1024.0
# RFC 2544 sets 198.18.0.0/15 aside for benchmarks: no real network answers there.
_RANGE = "198.18"
_NAME = re.compile(r"[a-z][a-z0-9-]{0,14}")


@dataclass(frozen=True, slots=True)
class Host:
    name: str
    cpus: float | None = None
    gloo_interface: str = "eth0"


@dataclass(frozen=True, slots=True)
class Link:
    """`start` is a host or a switch, `end` a switch."""

    start: str
    end: str
    rate: int | None = None  # bit/s
    delay: float | None = None  # seconds one way

    @property
    def ends(self) -> tuple[str, str]:
        return self.start, self.end


@dataclass(frozen=True, slots=True)
class Port:
    host: int
    interface: str
    link: int
    network: int  # index of the link's network

    @property
    def address(self) -> str:
        return f"{_RANGE}.{self.network}.{self.host + 1}"


@dataclass(frozen=True)
class Topology:
    hosts: tuple[Host, ...]
    switches: tuple[str, ...]
    links: tuple[Link, ...]

    @cached_property
    def ports(self) -> tuple[Port, ...]:
        return tuple(
            Port(number, f"eth{i}", link, self.networks[self.links[link].end])
            for number, host in enumerate(self.hosts)
            for i, link in enumerate(self._links_of(host.name))
        )

    @cached_property
    def networks(self) -> dict[str, int]:
        """The number of each switch's network; the last is that of the first host's eth0.

        Of two ranks the one with the lower address waits for the other to connect (gloo, torch 2.13): a host
        whose gloo is on another network is really reached over that.
        """
        heads = _Heads(self.switches)
        for link in self.links:
            if link.start in self.switches:
                heads.join(link.start, link.end)
        first = next(link.end for link in self.links if link.start == self.hosts[0].name)
        order = dict.fromkeys([heads.of(first), *(heads.of(switch) for switch in self.switches)])
        numbers = {head: number for number, head in enumerate(reversed(order))}
        return {switch: numbers[heads.of(switch)] for switch in self.switches}

    @property
    def addresses(self) -> list[str]:
        return [port.address for port in self.ports if port.interface == "eth0"]

    def slowest(self, network: int) -> int | None:
        """The rate of the slowest link of a network; None where none is shaped."""
        rates = (link.rate for link in self.links if self.networks[link.end] == network)
        return min((rate for rate in rates if rate is not None), default=None)

    def ways(self, source: Port) -> Iterator[tuple[Port, list[tuple[int, bool]]]]:
        """Yield the one way to every other port: links in order, and whether each is passed from start to
        end."""
        reached = {self.links[source.link].end: [(source.link, True)]}
        waiting = list(reached)
        while waiting:
            here = waiting.pop()
            for number, there, forward in self._beside(here):
                if there not in reached:
                    reached[there] = [*reached[here], (number, forward)]
                    waiting.append(there)
        for port in self.ports:
            if port.network == source.network and port.host != source.host:
                yield port, [*reached[self.links[port.link].end], (port.link, False)]

    def _beside(self, switch: str) -> Iterator[tuple[int, str, bool]]:
        """Switches that are joined to this one: over which link, and in which direction it is passed."""
        for number, link in enumerate(self.links):
            if link.start in self.switches and switch in link.ends:
                yield (number, link.end, True) if switch == link.start else (number, link.start, False)

    def _links_of(self, host: str) -> list[int]:
        return [number for number, link in enumerate(self.links) if link.start == host]


def star(hosts: int, rate: int | None, delay: float | None) -> Topology:
    """Hosts at one switch. `delay` is from host to host: each of the two links on the way has half of it."""
    names = [f"host{i}" for i in range(hosts)]
    half = None if delay is None else delay / 2
    return Topology(
        tuple(map(Host, names)), ("switch",), tuple(Link(name, "switch", rate, half) for name in names)
    )


def read(path: Path) -> Topology:
    """The file at `path`; what cannot be built is refused, with its line."""
    table = open_document(path)
    table.allow("switches", "hosts", "links")
    table.need("switches", "hosts", "links")
    switches = table.texts("switches")
    hosts = _hosts(table.table("hosts"))
    if not 1 <= len(hosts) <= MOST_HOSTS:
        raise table.error(f"there are {len(hosts)} hosts; a lab has 1 to {MOST_HOSTS}", "hosts")
    if not 1 <= len(switches) <= MOST_SWITCHES:
        raise table.error(f"there are {len(switches)} switches; a lab has 1 to {MOST_SWITCHES}", "switches")
    names = [host.name for host in hosts]
    for i, name in enumerate(switches):
        _check_name(table, name, "switches")
        if name in switches[:i] or name in names:
            raise table.error(f"two things are called {name!r}", "switches")
    entries = table.tables("links")
    found = [(link, entry) for entry in entries for link in _links(entry, names, switches)]
    topology = Topology(tuple(hosts), tuple(switches), tuple(link for link, _ in found))
    _check_tree(topology, [entry for _, entry in found])
    _check_joined(table, topology)
    return topology


def _hosts(table: Table) -> list[Host]:
    hosts = []
    for name in table.values:
        _check_name(table, name, name)
        entry = table.table(name)
        entry.allow("cpus", "gloo_interface")
        cpus = entry.number("cpus", LEAST_CPUS, MOST_CPUS) if "cpus" in entry.values else None
        interface = entry.text("gloo_interface") if "gloo_interface" in entry.values else "eth0"
        hosts.append(Host(name, cpus, interface))
    return hosts


def _check_name(table: Table, name: str, key: str) -> None:
    if _NAME.fullmatch(name) is None:
        raise table.error(f"{name!r} is no name: a-z, 0-9 and '-', a letter first, at most 15", key)


def _links(table: Table, hosts: list[str], switches: list[str]) -> Iterator[Link]:
    table.allow("from", "to", "rate", "delay")
    starts, end = table.texts("from"), table.text("to")
    rate = table.parsed("rate", parse_rate) if "rate" in table.values else None
    delay = table.parsed("delay", parse_delay) if "delay" in table.values else None
    if end not in switches:
        kind = "a host" if end in hosts else "not known"
        raise table.error(f"{end!r} is {kind}; a link leads to a switch: {', '.join(switches)}", "to")
    if not starts:
        raise table.error("from names no host", "from")
    for start in starts:
        if start not in hosts and start not in switches:
            raise table.error(f"{start!r} is neither a host nor a switch", "from")
        if start == end:
            raise table.error(f"{start!r} is linked to itself", "from")
        yield Link(start, end, rate, delay)


def _check_tree(topology: Topology, entries: list[Table]) -> None:
    heads = _Heads(topology.switches)
    for link, entry in zip(topology.links, entries, strict=True):
        if link.start in topology.switches and not heads.join(*link.ends):
            cause = f"{link.start!r} and {link.end!r} are joined already: packets would go round for ever"
            raise entry.error(cause, "from")


def _check_joined(table: Table, topology: Topology) -> None:
    linked = {name for link in topology.links for name in link.ends}
    for host in topology.hosts:
        if host.name not in linked:
            raise table.error(f"no link leads to host {host.name!r}", "hosts", host.name)
    for switch in topology.switches:
        if switch not in linked:
            raise table.error(f"no link leads to switch {switch!r}", "switches")
    for number in range(len(topology.hosts)):
        _check_ports(table, topology, number)


def _check_ports(table: Table, topology: Topology, number: int) -> None:
    host, ports = topology.hosts[number], [port for port in topology.ports if port.host == number]
    if ports[0].network != topology.ports[0].network:
        cause = f"{host.name!r} cannot reach the first host over eth0, its first link: join their switches"
        raise table.error(cause, "hosts", host.name)
    if len({port.network for port in ports}) < len(ports):
        raise table.error(f"{host.name!r} is twice in one network", "hosts", host.name)
    interfaces = [port.interface for port in ports]
    if host.gloo_interface not in interfaces:
        cause = f"{host.name!r} has no {host.gloo_interface!r}, only {', '.join(interfaces)}"
        raise table.error(cause, "hosts", host.name, "gloo_interface")


class _Heads:
    def __init__(self, names: Iterable[str]) -> None:
        self._above = {name: name for name in names}

    def of(self, name: str) -> str:
        while (above := self._above[name]) != name:
            name = above
        return name

    def join(self, one: str, other: str) -> bool:
        """False where they were joined before."""
        first, second = self.of(one), self.of(other)
        self._above[second] = first
        return first != second


def check_hosts(hosts: object) -> int:
    """A number of hosts that a lab can have."""
    if isinstance(hosts, bool) or not isinstance(hosts, int) or not 1 <= hosts <= MOST_HOSTS:
        raise ConfigError(f"hosts is {hosts!r}; a lab has 1 to {MOST_HOSTS}")
    return hosts
