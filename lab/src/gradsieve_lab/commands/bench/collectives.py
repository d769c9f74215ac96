"""`gradsieve bench collectives`: by messages of our own, and by gloo itself, on hosts of a lab."""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from pathlib import Path

from gradsieve.tools.cli import describe, size
from gradsieve_lab.commands.arguments import add_lab, check_hosts, sizes

_DESCRIPTION = """\
Collectives by messages of our own next to gloo's, round robin, in one run on a lab network.

Needs root.

columns:
  bytes      that a rank hands in; of an all-to-all, for all ranks together
  bare_ms    torch.distributed on gloo, called from the main thread; the median over turns
  engine_ms  the op as our engine carries it by itself: gloo's, and an all-to-all message by message
  rounds_ms  the same op in log2 P rounds of messages, halving and doubling
  direct_ms  the same op by messages from every rank to every other, some at once
  chosen     which of the last three a training takes on these links
  faster     bare_ms over the one chosen, of the same turn; the median
"""
_EXAMPLE = "example:\n  gradsieve bench collectives --hosts 16 --delay 5ms --json collectives.json\n"


def fill(parser: argparse.ArgumentParser) -> None:
    describe(parser, run, _DESCRIPTION, _EXAMPLE)
    add_lab(parser)
    add = parser.add_argument
    add(
        "--bytes",
        type=sizes,
        default="1e3,100e3,1e6",
        metavar="LIST",
        help="what a rank hands in (default: %(default)s)",
    )
    add("--rounds", type=size, default="5", metavar="N", help="turns of ten each (default: 5)")
    add("--json", type=Path, metavar="FILE", help="write the result there")


def run(args: argparse.Namespace) -> int:
    from gradsieve.tools.cli import results
    from gradsieve_lab.bench.collectives import measure as collectives

    check_hosts(args.hosts)
    results.writable(args.json)
    plan = collectives.Plan(args.hosts[0], args.rate, args.delay, args.bytes, args.rounds)
    every = []
    for hosts in args.hosts:
        rows = collectives.measure(replace(plan, hosts=hosts))
        every += rows
        print(results.table(rows, collectives.COLUMNS))
    if args.json is not None:
        results.write(args.json, asdict(plan) | results.hosts_of(args.hosts), every)
    return 0
