"""`gradsieve bench memory`: what a sync adds to the memory of a rank."""

from __future__ import annotations

import argparse
from pathlib import Path

from gradsieve.tools.cli import describe, progress, schemes, size

_DESCRIPTION = """\
How much memory each scheme needs besides parameters, gradients and the optimizer's state, with SGD and with
AdamW, on real ranks of this machine.

columns:
  before_mb, peak_mb   resident memory of the largest rank before the sync is made, and its peak in steps
  added_n              the difference, over the gradient's size: 3 would be three more gradients
  step_s               the sync's part of a step, on loopback
"""
_EXAMPLE = "example:\n  gradsieve bench memory --schemes stripes,exdyna --params 1e8\n"


def fill(parser: argparse.ArgumentParser) -> None:
    describe(parser, run, _DESCRIPTION, _EXAMPLE)
    add = parser.add_argument
    add("--schemes", type=schemes, default="stripes,exdyna", metavar="LIST", help="default: %(default)s")
    add("--world", type=size, default="2", metavar="N", help="ranks (default: 2)")
    add("--params", type=size, default="3e7", metavar="N", help="length of the gradient (default: 3e7)")
    add("--density", type=float, default=0.001, metavar="D", help="share that is sent (default: 0.001)")
    add("--json", type=Path, metavar="FILE", help="write the rows and how they came about there")


def run(args: argparse.Namespace) -> int:
    from gradsieve.schemes import check_density
    from gradsieve.tools.cli import results
    from gradsieve_lab.bench import footprint

    check_density(args.density)
    results.writable(args.json)
    rows = []
    cases = [(scheme, optimizer) for scheme in args.schemes for optimizer in footprint.OPTIMIZERS]
    with progress(len(cases)) as advance:
        for scheme, optimizer in cases:
            rows.append(footprint.measure(scheme, optimizer, args.world, args.params, args.density))
            advance(1, f"{scheme}, {optimizer}")
    print(results.table(rows, footprint.COLUMNS))
    if args.json is not None:
        config = {name: getattr(args, name) for name in ("schemes", "world", "params", "density")}
        results.write(args.json, config, rows)
    return 0
