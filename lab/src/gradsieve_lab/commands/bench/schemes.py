"""`gradsieve bench schemes`: what each scheme moves and what it makes of real gradients."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from gradsieve.tools.cli import describe, drawable, progress, schemes, size
from gradsieve_lab.commands.arguments import add_models, densities, worlds

_DESCRIPTION = """\
All schemes side by side on gradients recorded from real training.

Trains small models in this one process, each virtual rank on its own part of the data, and shows the same
recorded gradients to every scheme. No network is involved: `gradsieve bench step` measures seconds.

columns, means over the second half of the steps:
  words       4-byte words that the busiest rank moves
  times_k     words over k (P-1)/P, k being the elements to send
  rounds      messages one after the other, by the best known algorithm for each collective
  of_target   elements in the update over k
  fidelity    energy that the update captures, over that of the best update with as many elements; 1 is best
  residual    norm of the residual over the norm of a gradient, both as means over ranks
  imbalance   most elements that one rank selects over the mean, before any row is cut
  select_ms   processor time that the busiest rank spends in the scheme's own code
  lost        largest part of a gradient's element that is neither applied nor in the residual; 0 but for
  rounding
"""

_EXAMPLES = """\
examples:
  gradsieve bench schemes --models cnn --world 4 --densities 0.01
  gradsieve bench schemes --schemes exdyna,exdyna:blocks_per_partition=8,gtopk,gtopk:paper=true --plot all.png
"""


def fill(parser: argparse.ArgumentParser) -> None:
    describe(parser, run, _DESCRIPTION, _EXAMPLES)
    add_models(parser)
    add = parser.add_argument
    add(
        "--schemes",
        type=_talking,
        default="all",
        metavar="LIST",
        help="names with commas between them; settings follow a colon, with + between them (default: all)",
    )
    add(
        "--world", type=worlds, default="4,16", metavar="LIST", help="numbers of ranks (default: %(default)s)"
    )
    add(
        "--densities",
        type=densities,
        default="0.01,0.001",
        metavar="LIST",
        help="shares that are sent (default: %(default)s)",
    )
    add("--steps", type=size, default="12", metavar="N", help="recorded steps (default: %(default)s)")
    add("--json", type=Path, metavar="FILE", help="write the rows and how they came about there")
    add("--plot", type=Path, metavar="FILE.png", help="draw fidelity against words there")


def run(args: argparse.Namespace) -> int:
    from gradsieve.schemes import check_density
    from gradsieve.tools.cli import results
    from gradsieve_lab.bench.schemes import measure as bench
    from gradsieve_lab.bench.schemes.plot import plot

    for density in args.densities:
        check_density(density)
    drawable(args.plot)
    results.writable(args.json)
    results.writable(args.plot)
    plan = bench.Plan(args.models, args.schemes, args.world, args.densities, args.steps)
    with progress(plan.work()) as advance:
        rows = bench.measure_all(plan, advance)
    print(bench.tables(rows))
    if args.json is not None:
        results.write(args.json, asdict(plan), rows)
    if args.plot is not None:
        plot(rows, args.plot)
    return 0


def _talking(text: str) -> list[str]:
    """As `schemes`, in the order of the registry; `all` leaves out what exchanges nothing."""
    from gradsieve.schemes import SCHEMES

    if text == "all":
        return [name for name, kind in SCHEMES.items() if not kind.no_comm]
    return sorted(schemes(text), key=lambda each: list(SCHEMES).index(each.partition(":")[0]))
