"""A picture of a lab's network: hosts in a row, their switches above, other networks' switches below."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gradsieve_tools.emulation.topology import Link, Topology
from gradsieve_tools.quantities import BITS, SECONDS, spoken

Spot = tuple[float, float]

_HOST, _SWITCH = "#dce9f5", "#f3e3c3"
_COLOURS = ["#3b6ea5", "#c0392b", "#2e8b57", "#8e44ad", "#d98e04", "#17889b", "#7f4f24", "#666666"]


def draw(topology: Topology, out: Path, title: str) -> None:
    from matplotlib.figure import Figure

    spots = _spots(topology)
    rows = len({y for _, y in spots.values()})
    width = min(max(6.0, 1.15 * len(topology.hosts) + 1), 40.0)
    figure = Figure(figsize=(width, 1.5 * rows + 1.3), layout="constrained")
    axes = figure.add_subplot()
    _draw_links(axes, topology, spots)
    for number, host in enumerate(topology.hosts):
        text = f"{host.name}\nrank {number}"
        text += "" if host.cpus is None else f"\n{host.cpus:g} cpu"
        text += "" if host.gloo_interface == "eth0" else f"\ngloo: {host.gloo_interface}"
        _box(axes, spots[host.name], text, _HOST)
    for switch in topology.switches:
        _box(axes, spots[switch], switch, _SWITCH)
    axes.set_title(title)
    axes.margins(0.12, 0.15)
    axes.axis("off")
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    figure.savefig(out, dpi=150)


def label(link: Link) -> str:
    rate = "unshaped" if link.rate is None else spoken(link.rate, BITS)
    return rate if link.delay is None else f"{rate}, {spoken(link.delay, SECONDS)} one way"


def _draw_links(axes: Any, topology: Topology, spots: Mapping[str, Spot]) -> None:
    """Links of one kind in one colour; the legend says which. The slower, the thinner."""
    kinds = [kind for kind, _ in Counter(map(label, topology.links)).most_common()]
    rates = sorted({link.rate or float("inf") for link in topology.links})
    seen = set()
    for link in topology.links:
        kind = label(link)
        (x0, y0), (x1, y1) = spots[link.start], spots[link.end]
        axes.plot(
            [x0, x1],
            [y0, y1],
            color=_COLOURS[kinds.index(kind) % len(_COLOURS)],
            linewidth=1.2 + 2.4 * (1 + rates.index(link.rate or float("inf"))) / len(rates),
            linestyle="--" if link.delay else "-",
            label=None if kind in seen else kind,
            zorder=1,
        )
        seen.add(kind)
    for port in topology.ports:
        if port.interface != "eth0" or _is_multihomed(topology, port.host):
            (x0, y0), (x1, y1) = spots[topology.hosts[port.host].name], spots[topology.links[port.link].end]
            at = (x0 + 0.45 * (x1 - x0), y0 + 0.45 * (y1 - y0))
            white = {"facecolor": "white", "edgecolor": "none", "pad": 1}
            axes.annotate(port.interface, at, ha="center", va="center", fontsize=7, bbox=white, zorder=2)


def _is_multihomed(topology: Topology, host: int) -> bool:
    return sum(port.host == host for port in topology.ports) > 1


def _box(axes: Any, spot: Spot, text: str, colour: str) -> None:
    box = {"boxstyle": "round,pad=0.4", "facecolor": colour, "edgecolor": "#555555"}
    axes.annotate(text, spot, ha="center", va="center", fontsize=9, bbox=box, zorder=3)


def _spots(topology: Topology) -> dict[str, Spot]:
    """Hosts stand below the switch of their eth0, in the order of switches; a switch above its hosts."""
    first = {port.host: topology.links[port.link].end for port in topology.ports if port.interface == "eth0"}
    order = sorted(range(len(topology.hosts)), key=lambda host: topology.switches.index(first[host]))
    spots = {topology.hosts[host].name: (float(x), 0.0) for x, host in enumerate(order)}
    for below, above in ((False, 1.0), (True, -1.0)):
        members = [switch for switch in topology.switches if _is_second(topology, switch) is below]
        taken: set[tuple[int, int]] = set()
        for switch in sorted(members, key=lambda name: not _has_hosts(topology, name)):
            hosts = [a for a in _neighbours(topology, switch) if a not in topology.switches]
            near = [spots[a] for a in hosts or _neighbours(topology, switch) if a in spots]
            x = sum(x for x, _ in near) / len(near) if near else len(order) / 2
            level = 1 if _has_hosts(topology, switch) else 2
            while (round(x), level) in taken:
                x += 1
            taken.add((round(x), level))
            spots[switch] = (x, above * level)
    return spots


def _is_second(topology: Topology, switch: str) -> bool:
    return topology.networks[switch] != topology.ports[0].network


def _has_hosts(topology: Topology, switch: str) -> bool:
    return any(a not in topology.switches for a in _neighbours(topology, switch))


def _neighbours(topology: Topology, switch: str) -> list[str]:
    pairs = [link.ends for link in topology.links if switch in link.ends]
    return [one if other == switch else other for one, other in pairs]
