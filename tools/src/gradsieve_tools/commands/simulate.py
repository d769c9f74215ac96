"""`gradsieve simulate`: what a step takes at many ranks on networks that are not there."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from gradsieve.errors import ConfigError
from gradsieve_tools.cli import describe, drawable, progress, quantity, schemes, size
from gradsieve_tools.commands.values import worlds
from gradsieve_tools.quantities import BYTES_A_SECOND

if TYPE_CHECKING:
    from gradsieve_tools.simulate.study import Plan

_DESCRIPTION = """\
What a step takes at many ranks on a network that is not there.

The schemes' own generators run at the number of ranks asked for and make the messages; SimGrid carries them
over the network (`apt install python3-simgrid`). To 1,024 ranks schedules are real; beyond, times are
extrapolated from at least three worlds, and marked. docs/simulate.md says what is modelled and what is not.

columns:
  exchange_seconds     simulated, all units one after the other
  step_seconds         compute + selection + exchange: nothing hidden; hidden_...: all that can be
  efficiency           step without communication / step; noop is that limit, dense the baseline, always there
  of_dense             step over dense's, nothing hidden
  rounds               messages one after the other
  megabytes_sent       by the busiest rank of each round
  busiest_link         share of its rate that is used during the exchange
  recorded_n, scaled   size of the vector on which generators ran; whether bytes were scaled from there
"""

_EXAMPLES = """\
examples:
  gradsieve simulate --schemes dense,topk,exdyna --world 1024 --topology fat-tree --params 1e9 --rate 25gbit
  gradsieve simulate --world 64,256,1024,16384 --plot scaling.png --html scaling.html
  gradsieve simulate --topology two-clouds --wan 1gbit --wan-delay 20ms --stragglers 1:2 --slow-links 2:10
"""
_TOKENS, _FLOPS = 4096, 100e12
_MILLI = 1000.0


def fill(parser: argparse.ArgumentParser) -> None:
    describe(parser, run, _DESCRIPTION, _EXAMPLES)
    add = parser.add_argument
    add(
        "--schemes",
        type=schemes,
        default="topk,exdyna,stripes,spardl",
        metavar="LIST",
        help="names, settings after a colon; noop and dense are always there (default: %(default)s)",
    )
    add("--world", type=worlds, default="16,64,256", metavar="LIST",
        help="numbers of ranks (default: %(default)s)")  # fmt: skip
    add("--params", type=size, default="25e6", metavar="N", help="of the model (default: %(default)s)")
    add("--density", type=float, metavar="D",
        help="share that is sent, but by stripes (default: each scheme's own)")  # fmt: skip
    add("--collectives", choices=["ours", "ring", "log"], default="ours",
        help="as in training, dense by gloo's rings and the others in log2 P rounds where these are faster; "
        "or all of them by rings, or all in rounds (default: ours)")  # fmt: skip
    _add_network(parser)
    _add_ranks(parser)
    add("--json", type=Path, metavar="FILE", help="write rows, loads of links and how they came about there")
    add("--plot", type=Path, metavar="FILE.png", help="draw curves and loads there")
    add("--html", type=Path, metavar="FILE.html", help="write the same as one page there")


def _add_network(parser: argparse.ArgumentParser) -> None:
    from gradsieve_tools.simulate.platforms import TOPOLOGIES

    add = parser.add_argument
    add("--topology", choices=list(TOPOLOGIES), default="star", help="of the network (default: star)")
    add("--rate", "--link", default="10gbit", metavar="R", help="of every link (default: %(default)s)")
    add("--delay", default="5us", metavar="D", help="of every link, one way (default: %(default)s)")
    add("--wan", default="1gbit", metavar="R", help="between two clouds (default: %(default)s)")
    add("--wan-delay", default="20ms", metavar="D", help="of it, one way (default: %(default)s)")
    add("--message", default="30us", metavar="T",
        help="that a rank is busy with each message it sends (default: %(default)s)")  # fmt: skip
    add("--slow-links", type=_some, default=(0, 1.0), metavar="COUNT:FACTOR",
        help="so many hosts, evenly spread, have links so many times slower")  # fmt: skip


def _add_ranks(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--compute", metavar="T",
        help="forward and backward of a rank, e.g. 250ms (default: 6 N operations for each of 4,096 tokens, "
        "at 100 Tflop/s)")  # fmt: skip
    add("--memory", type=quantity(BYTES_A_SECOND, "20GB/s"), default="20GB/s", metavar="B",
        help="at which selection reads the gradient (default: %(default)s)")  # fmt: skip
    add("--stragglers", type=_some, default=(0, 1.0), metavar="COUNT:FACTOR",
        help="so many ranks compute so many times longer")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    from gradsieve_tools.bench.common.machine import one_thread
    from gradsieve_tools.cli import results
    from gradsieve_tools.simulate import study
    from gradsieve_tools.simulate.network import require
    from gradsieve_tools.simulate.page import page
    from gradsieve_tools.simulate.picture import draw

    plan = _plan(args)
    require()
    for path in (args.plot, args.html):
        drawable(path)
    for path in (args.json, args.plot, args.html):
        results.writable(path)
    with progress(plan.work()) as advance, one_thread():
        rows = study.run(plan, advance)
    print(results.table(rows, study.COLUMNS))
    way = {"ours": "as in training"}.get(plan.collectives, plan.collectives)
    title = f"{plan.params:,} parameters on a simulated {plan.topology}, collectives: {way}"
    title = f"{title}, {args.rate} links"
    if args.json is not None:
        results.write(args.json, asdict(plan), rows)
    if args.plot is not None:
        draw(rows, title, args.plot)
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


def _some(text: str) -> tuple[int, float]:
    count, colon, factor = text.partition(":")
    try:
        found = int(count), float(factor)
    except ValueError:
        found = -1, 0.0
    if not colon or found[0] < 0 or not 1 <= found[1] <= 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not COUNT:FACTOR, a factor of 1 or more, such as 2:10")
    return found
