"""Networks for SimGrid: hosts, links and ways between them, all links both ways at once at the full rate.

    star         one switch that is never the bottleneck
    fat-tree     16 hosts a leaf switch with 8 links up (2:1); above the leaves nothing is oversubscribed
    dragonfly    4 hosts a router, 4 chassis a group, as many groups as routers in a chassis; minimal routes
    torus        three dimensions, as near to a cube as P allows
    two-clouds   two stars of P/2 hosts, joined by one WAN link

Ranks lie on hosts in order, so that neighbours in a ring are neighbours in the network.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

from gradsieve.errors import ConfigError
from gradsieve_tools.simulate.messages import Price
from gradsieve_tools.simulate.network import Platform

_LEAF, _UP = 16, 8
_CHASSIS, _PER_ROUTER = 4, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Wires:
    """Rates in bytes a second, delays in seconds, one way."""

    rate: float
    delay: float
    wan_rate: float
    wan_delay: float
    message_seconds: float
    slow_hosts: int = 0
    slow_factor: float = 1.0  # times slower the slow hosts' links are


def platform(topology: str, world: int, wires: Wires) -> Platform:
    """The network of `world` hosts."""
    if topology not in TOPOLOGIES:
        raise ConfigError(f"no topology is called {topology!r}; there are: {', '.join(TOPOLOGIES)}")
    if world < 2:
        raise ConfigError(f"a network has 2 hosts or more, not {world}")
    body, hosts = TOPOLOGIES[topology](world, wires)
    price = Price(wires.message_seconds + 2 * wires.delay, 1 / wires.rate)
    slow = {hosts[rank]: wires.slow_factor for rank in spread(wires.slow_hosts, world)}
    return Platform(_document(body), hosts, price, wires.message_seconds, slow)


def spread(count: int, world: int) -> list[int]:
    """So many ranks, evenly among all."""
    if count > world:
        raise ConfigError(f"{count} of {world} ranks cannot be slow")
    return [number * world // count for number in range(count)]


def _document(body: str) -> str:
    head = "<?xml version='1.0'?>\n<!DOCTYPE platform SYSTEM \"https://simgrid.org/simgrid.dtd\">\n"
    return f'{head}<platform version="4.1">\n{body}\n</platform>\n'


def _cluster(name: str, hosts: int, wires: Wires, more: str = "") -> str:
    return (
        f'<cluster id="{name}" prefix="{name}-" suffix="" radical="0-{hosts - 1}" speed="1Gf" '
        f'bw="{wires.rate!r}Bps" lat="{wires.delay!r}s" sharing_policy="SPLITDUPLEX" {more}/>'
    )


def _names(cluster: str, count: int) -> tuple[str, ...]:
    return tuple(f"{cluster}-{number}" for number in range(count))


def _star(world: int, wires: Wires) -> tuple[str, tuple[str, ...]]:
    return _cluster("star", world, wires), _names("star", world)


def _fat_tree(world: int, wires: Wires) -> tuple[str, tuple[str, ...]]:
    if world <= _LEAF:
        down, up = [world], [1]
    elif world <= _LEAF**2:
        down, up = [_LEAF, math.ceil(world / _LEAF)], [1, _UP]
    else:
        down, up = [_LEAF, _LEAF, math.ceil(world / _LEAF**2)], [1, _UP, _LEAF]
    shape = ";".join([str(len(down)), _listed(down), _listed(up), _listed([1] * len(down))])
    more = f'topology="FAT_TREE" topo_parameters="{shape}"'
    return _cluster("tree", math.prod(down), wires, more), _names("tree", world)


def _dragonfly(world: int, wires: Wires) -> tuple[str, tuple[str, ...]]:
    # SimGrid 3.32 dies on routes between groups where there are more groups than routers in a chassis.
    side = math.ceil(math.sqrt(world / (_CHASSIS * _PER_ROUTER)))
    more = f'topology="DRAGONFLY" topo_parameters="{side},1;{_CHASSIS},1;{side},1;{_PER_ROUTER}"'
    return _cluster("fly", side * side * _CHASSIS * _PER_ROUTER, wires, more), _names("fly", world)


def _torus(world: int, wires: Wires) -> tuple[str, tuple[str, ...]]:
    shape = _near_cube(world)
    more = f'topology="TORUS" topo_parameters="{_listed(shape)}"'
    return _cluster("torus", math.prod(shape), wires, more), _names("torus", world)


def _near_cube(world: int) -> tuple[int, ...]:
    """The least box that holds all and no side more than twice another, or of those the most even. Sides
    are 2 or more: SimGrid 3.32 dies on a torus that is flat."""
    sides = range(2, 2 * math.ceil(world ** (1 / 3)) + 1)
    boxes = [
        (wide, deep, max(2, math.ceil(world / (wide * deep)))) for wide, deep in product(sides, repeat=2)
    ]
    return min(boxes, key=lambda box: (max(box) > 2 * min(box), math.prod(box), max(box), box))


def _two_clouds(world: int, wires: Wires) -> tuple[str, tuple[str, ...]]:
    halves = {"east": math.ceil(world / 2), "west": world // 2}
    clouds = [_cluster(name, count, wires, f'router_id="{name}-router"') for name, count in halves.items()]
    ways = [
        f'<link id="wan-from-{one}" bandwidth="{wires.wan_rate!r}Bps" latency="{wires.wan_delay!r}s"/>'
        for one in halves
    ]
    routes = [
        f'<zoneRoute src="{one}" dst="{other}" gw_src="{one}-router" gw_dst="{other}-router" '
        f'symmetrical="NO"><link_ctn id="wan-from-{one}"/></zoneRoute>'
        for one, other in (("east", "west"), ("west", "east"))
    ]
    body = "\n".join(['<zone id="both" routing="Full">', *clouds, *ways, *routes, "</zone>"])
    return body, _names("east", halves["east"]) + _names("west", halves["west"])


def _listed(numbers: list[int] | tuple[int, ...]) -> str:
    return ",".join(map(str, numbers))


TOPOLOGIES: dict[str, Callable[[int, Wires], tuple[str, tuple[str, ...]]]] = {
    "star": _star,
    "fat-tree": _fat_tree,
    "dragonfly": _dragonfly,
    "torus": _torus,
    "two-clouds": _two_clouds,
}
