"""`gradsieve bench bits`: what an exchange sends for its bits, next to the limit."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from gradsieve.errors import ConfigError
from gradsieve.tools.cli import describe, drawable, progress, schemes, size
from gradsieve_lab.commands.arguments import densities, tasks, worlds

_DESCRIPTION = """\
How much one exchange sends of the residual, for the bits it takes: every scheme and way to send values.

Trains tasks on virtual ranks in this one process, with exchange of steps by stripes as they are by default,
and keeps now and then each rank's residual just before an exchange. Every scheme is shown the same
vectors, and what an exchange sends is not taken away from them: these are figures of one exchange, not of a
training in which a scheme finds what it has left itself. Stripes are measured over whole rounds, others on
every snapshot, those that remember after they have seen all of them once.

columns:
  values    how values travel
  density   share of the elements that is asked for
  bits      moved by the busiest rank, for one parameter
  known      share of the energy of the mean over ranks that the update brings: 1 - |mean - update/P|^2 over
            |mean|^2; below 0 where it brings more noise than news
  bound     most that as many bits send of a Gaussian vector, 1 - 2^(-2R) with R bits an element, which are
            2R(P-1)/P up and down

The bound assumes that one rank knows the mean already and that all elements are Gaussian, alike and
independent. It is none for vectors with heavy tails: where little of the vector holds most of the energy, who
finds it sends more.
"""

_EXAMPLES = """\
examples:
  gradsieve bench bits --plot bits.png
  gradsieve bench bits --tasks lstm --schemes stripes,exdyna,topk --values sign,int4 --densities 0.01,0.1,1
"""


def fill(parser: argparse.ArgumentParser) -> None:
    describe(parser, run, _DESCRIPTION, _EXAMPLES)
    add = parser.add_argument
    add(
        "--tasks",
        type=tasks,
        default="cnn,transformer",
        metavar="LIST",
        help="what is trained (default: %(default)s)",
    )
    add(
        "--schemes",
        type=_lossy,
        default="all",
        metavar="LIST",
        help="names with commas between them; settings follow a colon, with + between them (default: all)",
    )
    add("--values", type=_values, default="all", metavar="LIST", help="ways to send values (default: all)")
    add(
        "--densities",
        type=densities,
        default="0.001,0.003,0.01,0.03,0.1,0.3,1",
        metavar="LIST",
        help="shares that are sent (default: %(default)s)",
    )
    add("--world", type=worlds, default="4", metavar="N", help="ranks (default: 4)")
    add("--steps", type=size, default="200", metavar="N", help="before the first snapshot (default: 200)")
    add("--snapshots", type=size, default="4", metavar="N", help="of the residual (default: 4)")
    add("--every", type=size, default="7", metavar="N", help="steps between two snapshots (default: 7)")
    add("--json", type=Path, metavar="FILE", help="write the rows and how they came about there")
    add("--plot", type=Path, metavar="FILE.png", help="draw knownagainst bits there")


def run(args: argparse.Namespace) -> int:
    from gradsieve.schemes import check_density
    from gradsieve.tools.cli import results
    from gradsieve_lab.bench.bits import measure as bits
    from gradsieve_lab.bench.bits.plot import plot

    if len(args.world) > 1:
        raise ConfigError("--world is one number here: the residual depends on it")
    for density in args.densities:
        check_density(density)
    drawable(args.plot)
    results.writable(args.json)
    results.writable(args.plot)
    plan = bits.Plan(
        args.tasks,
        args.schemes,
        args.values,
        args.densities,
        args.world[0],
        args.steps,
        args.snapshots,
        args.every,
    )
    with progress(plan.work()) as advance:
        rows = bits.measure_all(plan, advance)
    print(results.table(rows, bits.COLUMNS))
    if args.json is not None:
        results.write(args.json, asdict(plan), rows)
    if args.plot is not None:
        plot(rows, plan.world, args.plot)
    return 0


def _lossy(text: str) -> list[str]:
    """As `schemes`; `all` leaves out what sends nothing or everything."""
    from gradsieve.schemes import SCHEMES

    if text == "all":
        return [name for name, kind in SCHEMES.items() if not kind.no_comm and not kind.lossless]
    return schemes(text)


def _values(text: str) -> list[str]:
    from gradsieve.schemes import VALUE_CODECS

    names = list(VALUE_CODECS) if text == "all" else list(dict.fromkeys(text.split(",")))
    unknown = [name for name in names if name not in VALUE_CODECS]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"values do not travel as {', '.join(map(repr, unknown))}; there are: {', '.join(VALUE_CODECS)}"
        )
    return names
