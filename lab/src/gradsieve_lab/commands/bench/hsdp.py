"""`gradsieve bench hsdp`: sharded inside hosts, sparse between them, against dense and against the limit."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from gradsieve.tools.cli import describe, size
from gradsieve_lab.commands.arguments import check_hosts

_DESCRIPTION = """\
A training step of an MLP that FSDP2 shards inside hosts: ways to exchange between the hosts, round robin,
in one run on a lab network. All ranks of a host share its link; among themselves they talk as fast as the
machine goes. Parameters stay gathered from forward to backward. After the measuring, hosts' bits are compared
until --steps are full. Needs root.

rows:
  noop        nothing between the hosts: the limit
  dense       FSDP2's own HSDP, which averages all gradients
  auto        gradsieve.attach(model, optimizer, replicate=...), as it is without settings
columns:
  vs_noop     step over noop's, the median of the rounds; _half: the middle half of the rounds
  vs_dense    dense's step over this one's
  bytes_sent  by the busiest host, as its network interface counts them
"""
_EXAMPLE = (
    "example:\n  gradsieve bench hsdp --hosts 2 --per-host 2 --rate 1gbit --params 25e6 --json hsdp.json\n"
)


def fill(parser: argparse.ArgumentParser) -> None:
    describe(parser, run, _DESCRIPTION, _EXAMPLE)
    add = parser.add_argument
    add("--hosts", type=size, default="2", metavar="N", help="hosts in the lab (default: 2)")
    add("--per-host", type=size, default="2", metavar="N", help="ranks, and shards, a host (default: 2)")
    add("--rate", metavar="R", help="of each host's link, e.g. 1gbit (default: unshaped)")
    add("--delay", metavar="D", help="one way, e.g. 5ms (default: none)")
    add("--params", type=size, default="25e6", metavar="N", help="size of the MLP (default: 25e6)")
    add("--batch", type=size, default="8", metavar="N", help="rows a rank, 32 at most (default: 8)")
    add("--rounds", type=size, default="9", metavar="N", help="turns of each (default: 9)")
    add("--steps", type=size, default="200", metavar="N", help="of auto, in all (default: 200)")
    add("--json", type=Path, metavar="FILE", help="write the result there")


def run(args: argparse.Namespace) -> int:
    from gradsieve.tools.cli import results
    from gradsieve_lab.bench.hsdp import measure as hsdp

    check_hosts([args.hosts])
    results.writable(args.json)
    plan = hsdp.Plan(
        args.hosts, args.per_host, args.rate, args.delay, args.params, args.batch, args.rounds, args.steps
    )
    rows = hsdp.measure(plan)
    print(results.table(rows, hsdp.COLUMNS))
    print(f"Hosts had the same bits for {rows[-1]['replicas_equal_for']} steps.")
    if args.json is not None:
        results.write(args.json, asdict(plan), rows)
    return 0
