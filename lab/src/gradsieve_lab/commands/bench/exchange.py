"""`gradsieve bench exchange`: a scheme's collectives through our engine, and the same through bare gloo."""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from pathlib import Path

from gradsieve.tools.cli import describe, size
from gradsieve_lab.commands.arguments import add_lab, check_hosts

_DESCRIPTION = """\
What our engine adds to the collectives of a step: the same ones bare, round robin, on a lab network.

A few real steps show which collectives the scheme asks for, and of what size. Needs root.

rows:
  bare gloo   these collectives by torch.distributed, called from the main thread
  engine      the same, asked for by a program on our engine
  in a step   the collectives of whole steps: a rank waits there also for ranks that select more slowly
columns:
  ms          the median over turns
  ratio       to bare gloo of the same round, the median; of the steps, to the median of bare gloo
  bytes_sent  by the busiest rank, as its network interface counts them
"""
_EXAMPLE = "example:\n  gradsieve bench exchange --hosts 4 --rate 1gbit --params 25e6 --json exchange.json\n"


def fill(parser: argparse.ArgumentParser) -> None:
    describe(parser, run, _DESCRIPTION, _EXAMPLE)
    add_lab(parser)
    add = parser.add_argument
    add(
        "--scheme",
        default="exdyna",
        metavar="NAME",
        help="settings follow a colon, the exchange's an @: exdyna:values=bf16@gradients (default: exdyna)",
    )
    add("--params", type=size, default="25e6", metavar="N", help="size of the MLP (default: 25e6)")
    add("--density", type=float, default=0.001, metavar="D", help="share that is sent (default: 0.001)")
    add("--rounds", type=size, default="15", metavar="N", help="turns (default: 15)")
    add("--json", type=Path, metavar="FILE", help="write the result there")


def run(args: argparse.Namespace) -> int:
    from gradsieve.schemes import check_density
    from gradsieve.tools.cli import results
    from gradsieve_lab.bench.common.syncs import treated
    from gradsieve_lab.bench.exchange import measure as exchange

    check_density(args.density)
    treated(args.scheme, args.density)  # refused here rather than by every host
    check_hosts(args.hosts)
    results.writable(args.json)
    plan = exchange.Plan(
        args.hosts[0], args.rate, args.delay, args.scheme, args.params, args.density, args.rounds
    )
    every = []
    for hosts in args.hosts:
        rows = exchange.measure(replace(plan, hosts=hosts))
        every += rows
        print(results.table(rows, exchange.COLUMNS))
    if args.json is not None:
        results.write(args.json, asdict(plan) | results.hosts_of(args.hosts), every)
    return 0
