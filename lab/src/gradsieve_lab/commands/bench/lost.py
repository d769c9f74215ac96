"""`gradsieve bench lost`: what a scheme loses of the gradient."""

from __future__ import annotations

import argparse
from pathlib import Path

from gradsieve.tools.cli import describe, progress, schemes, size
from gradsieve_lab.commands.arguments import add_models

_DESCRIPTION = """\
How much gradient a scheme loses over some steps of training: exactly 0, or it breaks the law.

Exchanges gradients recorded from real training among virtual ranks, in float64 and on a grid on which no sum
rounds, and looks for what is in no update and in no residual.

columns:
  lost        sum of the magnitudes that are missing, over that of all updates
  sent        the latter
  of_target   elements in an update over k
"""
_EXAMPLE = "example:\n  gradsieve bench lost --models cnn --schemes gtopk,gtopk:paper=true --world 8\n"
_DEFAULT = "spardl,spardl:residuals=end,spardl:residuals=local,gtopk,gtopk:paper=true"


def fill(parser: argparse.ArgumentParser) -> None:
    describe(parser, run, _DESCRIPTION, _EXAMPLE)
    add_models(parser)
    add = parser.add_argument
    add("--schemes", type=schemes, default=_DEFAULT, metavar="LIST", help="default: %(default)s")
    add("--world", type=size, default="8", metavar="N", help="ranks (default: 8)")
    add("--density", type=float, default=0.01, metavar="D", help="share that is sent (default: 0.01)")
    add("--steps", type=size, default="12", metavar="N", help="recorded steps (default: 12)")
    add("--json", type=Path, metavar="FILE", help="write the rows and how they came about there")


def run(args: argparse.Namespace) -> int:
    from gradsieve.schemes import check_density
    from gradsieve.tools.cli import results
    from gradsieve_lab.bench import lost
    from gradsieve_lab.bench.common.recordings import WARM_STEPS

    check_density(args.density)
    results.writable(args.json)
    work = len(args.models) * (WARM_STEPS + args.steps * (1 + len(args.schemes)))
    with progress(work) as advance:
        rows = lost.measure_all(args.models, args.schemes, args.world, args.density, args.steps, advance)
    print(results.table(rows, lost.COLUMNS))
    if args.json is not None:
        names = ("models", "schemes", "world", "density", "steps")
        results.write(args.json, {name: getattr(args, name) for name in names}, rows)
    return 0
