"""`gradsieve simulate`: what a step takes at many ranks on networks that are not there."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING

from gradsieve.errors import ConfigError
from gradsieve_tools.cli import progress

if TYPE_CHECKING:
    from gradsieve_tools.simulate.study import Plan


_TOKENS, _FLOPS = 4096, 100e12
_MILLI = 1000.0


def run(args: argparse.Namespace) -> int:
    from gradsieve_tools.bench.common.machine import one_thread
    from gradsieve_tools.cli import results
    from gradsieve_tools.simulate import study
    from gradsieve_tools.simulate.network import require
    from gradsieve_tools.simulate.page import page
    from gradsieve_tools.simulate.picture import figure

    plan = _plan(args)
    require()
    with progress(plan.work()) as advance, one_thread():
        rows = study.run(plan, advance)
    print(results.table(rows, study.COLUMNS))
    way = {"ours": "as in training"}.get(plan.collectives, plan.collectives)
    title = f"{plan.params:,} parameters on a simulated {plan.topology}, collectives: {way}"
    title = f"{title}, {args.rate} links"
    if args.json is not None:
        results.write(args.json, asdict(plan), rows)
    if args.plot is not None:
        figure(rows, title).savefig(args.plot, dpi=150)
    if args.html is not None:
        args.html.write_text(page(rows, title, _settings(plan)))
    return 0


def _plan(args: argparse.Namespace) -> Plan:
    from gradsieve.schemes import check_density
    from gradsieve_tools.emulation.units import parse_delay, parse_rate
    from gradsieve_tools.simulate.platforms import Wires
    from gradsieve_tools.simulate.study import Plan

    def rate(option: str, text: str) -> float:
        bits = parse_rate(text)
        if bits is None:
            raise ConfigError(f"a simulated link has a rate: give --{option} one, e.g. 10gbit")
        return bits / 8

    if args.density is not None:
        check_density(args.density)
    compute = parse_delay(args.compute) or 0.0 if args.compute else 6 * args.params * _TOKENS / _FLOPS
    wires = Wires(
        rate=rate("rate", args.rate),
        delay=parse_delay(args.delay) or 0.0,
        wan_rate=rate("wan", args.wan),
        wan_delay=parse_delay(args.wan_delay) or 0.0,
        message_seconds=parse_delay(args.message) or 0.0,
        slow_hosts=args.slow_links[0],
        slow_factor=args.slow_links[1],
    )
    return Plan(
        schemes=tuple(args.schemes),
        worlds=tuple(args.world),
        topology=args.topology,
        wires=wires,
        params=args.params,
        density=args.density,
        collectives=args.collectives,
        compute_seconds=compute,
        memory_rate=args.memory,
        stragglers=args.stragglers[0],
        straggler_factor=args.stragglers[1],
    )


def _settings(plan: Plan) -> dict[str, str]:
    wires = plan.wires
    found = {
        "links": f"{wires.rate * 8 / 1e9:g} Gbit/s, {wires.delay * 1e6:g} us",
        "a message": f"{wires.message_seconds * 1e6:g} us of a rank",
        "compute": f"{plan.compute_seconds * _MILLI:.0f} ms",
        "selection": f"at {plan.memory_rate / 1e9:g} GB/s",
        "density": "each scheme's own" if plan.density is None else f"{plan.density:g}",
    }
    if plan.topology == "two-clouds":
        found["WAN"] = f"{wires.wan_rate * 8 / 1e9:g} Gbit/s, {wires.wan_delay * _MILLI:g} ms"
    if wires.slow_hosts:
        found["slow links"] = f"{wires.slow_hosts} hosts, {wires.slow_factor:g} times"
    if plan.stragglers:
        found["stragglers"] = f"{plan.stragglers} ranks, {plan.straggler_factor:g} times"
    return found
