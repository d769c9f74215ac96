"""`gradsieve bench overhead`: what a rank computes besides training, over the least it could be."""

from __future__ import annotations

import argparse
from pathlib import Path

from gradsieve.errors import ConfigError
from gradsieve.tools.cli import describe, progress, schemes, size

_DESCRIPTION = """\
The arithmetic of a step alone, on virtual ranks, in one thread; no network and no training.

columns:
  exchange   what is exchanged: steps (the default of the library) or gradients
  kernel     compiled (needs numba) or pure torch
  ours_ms    all that a rank computes in a step, the mean over ranks: accumulate, select, encode, decode,
             apply, commit, check
  bare_ms    a.add_(b) and b.zero_() over as many elements
  ratio      of the two, the median over rounds; 1 is the floor. Both are processor time
  density    elements in the update over all
The second table has the milliseconds by stage, by the clock on the wall.
"""
_EXAMPLE = (
    "example:\n  gradsieve bench overhead --params 25e6 --world 4 --density 0.001 --json overhead.json\n"
)


def fill(parser: argparse.ArgumentParser) -> None:
    describe(parser, run, _DESCRIPTION, _EXAMPLE)
    add = parser.add_argument
    add("--schemes", type=schemes, default="exdyna", metavar="LIST", help="default: %(default)s")
    add("--world", type=size, default="4", metavar="N", help="virtual ranks (default: 4)")
    add("--params", type=size, default="25e6", metavar="N", help="length of the gradient (default: 25e6)")
    add("--density", type=float, default=0.001, metavar="D", help="share that is sent (default: 0.001)")
    add("--json", type=Path, metavar="FILE", help="write the rows and how they came about there")


def run(args: argparse.Namespace) -> int:
    from gradsieve.schemes import check_density
    from gradsieve.tools.cli import results
    from gradsieve_lab.bench import overhead

    check_density(args.density)
    if args.world < 2:
        raise ConfigError("--world is 2 or more: a rank alone exchanges nothing")
    results.writable(args.json)
    cases = overhead.cases(args.schemes, args.world, args.params, args.density)
    with progress(sum(map(overhead.work, cases))) as advance:
        rows = [row for case in cases for row in overhead.measure(case, advance)]
    print(results.table(rows, overhead.COLUMNS))
    stages = [name for name in overhead.STAGES if any(name in row["stage_ms"] for row in rows)]
    print("\n" + results.table(overhead.by_stage(rows), ["scheme", "exchange", "kernel", *stages]))
    if args.json is not None:
        config = {name: getattr(args, name) for name in ("schemes", "world", "params", "density")}
        results.write(args.json, config, rows)
    return 0
