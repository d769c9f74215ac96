"""SimGrid, in a process of its own: reads what to carry, line by line, and says how long it took.

Run by path, with whichever Python has SimGrid (Debian's package is for Debian's own), so it imports nothing
but the standard library and simgrid. A process of its own because SimGrid has one engine a process, for ever.

Lines are JSON. The first is the network:

    {"platform": file, "hosts": names, "slow": {host: factor}}      -> {"links": names, "rates": bytes/s}

Then rounds of messages that start at the same time, and the loads of links since they were last asked for:

    {"sources": [...], "targets": [...], "sizes": [...], "times": n}    -> {"seconds": of one round}
    {"loads": true}                                                     -> {"loads": bytes by link}

The model of a message is its delay, and its bytes at the rate that is left by max-min fair sharing of every
link on its way. No TCP: no slow start, no headers, no acknowledgements in the other direction.
"""

from __future__ import annotations

import json
import sys
from typing import Any

_MODEL = ("network/model:CM02", "network/TCP-gamma:0", "network/crosstraffic:0")


class Carrier:
    def __init__(self, simgrid: Any, engine: Any, hosts: list[Any]) -> None:
        self.simgrid, self.engine, self.hosts = simgrid, engine, hosts
        self.links = list(engine.all_links)
        self.places = {link.name: place for place, link in enumerate(self.links)}
        self.routes: dict[tuple[int, int], list[int]] = {}
        self.loads = [0.0] * len(self.links)

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        if "loads" in asked:
            loads, self.loads = self.loads, [0.0] * len(self.links)
            return {"loads": loads}
        messages = list(zip(asked["sources"], asked["targets"], asked["sizes"], strict=True))
        before = self.engine.clock
        send = self.simgrid.Comm.sendto_async
        comms = [send(self.hosts[source], self.hosts[target], size) for source, target, size in messages]
        self.simgrid.Comm.wait_all(comms)
        seconds = self.engine.clock - before
        for source, target, size in messages:
            for place in self._route(source, target):
                self.loads[place] += size * asked["times"]
        return {"seconds": seconds}

    def _route(self, source: int, target: int) -> list[int]:
        known = self.routes.get((source, target))
        if known is None:
            links, _ = self.hosts[source].route_to(self.hosts[target])
            known = self.routes[source, target] = [self.places[link.name] for link in links]
        return known


def slow_down(hosts: list[Any], slow: dict[str, float]) -> None:
    """The links of some hosts, both ways: the first of a route from there and the last of one to there."""
    for host in hosts:
        if host.name in slow:
            other = hosts[0] if host.name != hosts[0].name else hosts[1]
            for link in (host.route_to(other)[0][0], other.route_to(host)[0][-1]):
                link.set_bandwidth(link.bandwidth / slow[host.name])


def main() -> int:
    import simgrid

    asked = json.loads(sys.stdin.readline())
    engine = simgrid.Engine(["gradsieve", "--log=root.thres:error", *(f"--cfg={each}" for each in _MODEL)])
    engine.load_platform(asked["platform"])
    hosts = [simgrid.Host.by_name(name) for name in asked["hosts"]]
    slow_down(hosts, asked["slow"])
    carrier = Carrier(simgrid, engine, hosts)
    say({"links": [link.name for link in carrier.links], "rates": [link.bandwidth for link in carrier.links]})

    def work() -> None:
        for line in sys.stdin:
            say(carrier.answer(json.loads(line)))

    simgrid.Actor.create("carrier", hosts[0], work)
    engine.run()
    return 0


def say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Exception as error:  # in one line: the parent process passes it on
        sys.exit(f"{type(error).__name__}: {error}")
