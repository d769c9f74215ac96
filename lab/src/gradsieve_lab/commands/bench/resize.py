"""`gradsieve bench resize`: trainings that change their number of ranks."""

from __future__ import annotations

import argparse
from pathlib import Path

from gradsieve.errors import ConfigError
from gradsieve.tools.cli import describe, progress, size

_DESCRIPTION = """\
Whether a training that changes its number of ranks ends as one that does not.

Trains a task on virtual ranks, with as many examples in a step throughout. At even distances the ranks stop
and as many as come next go on with what they had, by the rules of a checkpoint: the residual is kept, rank r
takes the optimizer of old rank r mod P.

columns:
  ranks       one after the other
  final       the metric after the last step and a flush: test accuracy, or loss on unseen data; mean over
              seeds
  spread      its standard deviation over seeds
  kept        largest relative change of the residual, over all ranks, at a change of their number
"""
_EXAMPLE = "example:\n  gradsieve bench resize --task lstm --bits 0.75 --ranks 4,4-2-4,4-6-3 --batch 24\n"


def fill(parser: argparse.ArgumentParser) -> None:
    describe(parser, run, _DESCRIPTION, _EXAMPLE)
    add = parser.add_argument
    add("--task", default="transformer", metavar="NAME", help="what is trained (default: %(default)s)")
    add("--scheme", default="stripes", metavar="NAME", help="default: %(default)s")
    add("--bits", type=float, metavar="B", help="a budget a parameter and step, which stripes spend")
    add("--density", type=float, metavar="D", help="share that is sent, where there is no budget")
    add(
        "--ranks",
        type=_ways,
        default="4,4-2-4,4-6-3",
        metavar="LIST",
        help="numbers of ranks, one after the other with - between them (default: %(default)s)",
    )
    add("--seeds", type=size, default="3", metavar="N", help="trainings of each kind (default: 3)")
    add("--steps", type=size, default="300", metavar="N", help="of a training (default: 300)")
    add(
        "--batch",
        type=size,
        default="24",
        metavar="N",
        help="examples in a step, over all ranks (default: 24)",
    )
    add("--json", type=Path, metavar="FILE", help="write the rows and how they came about there")


def run(args: argparse.Namespace) -> int:
    from gradsieve.tools.cli import results
    from gradsieve_lab.bench import resize

    if (args.bits is None) == (args.density is None):
        raise ConfigError("give --bits or --density, and not both")
    results.writable(args.json)
    amount = {"bits": args.bits} if args.density is None else {"density": args.density}
    with progress(len(args.ranks) * args.seeds * args.steps) as advance:
        rows = resize.measure_all(
            args.task, args.scheme, amount, args.ranks, args.seeds, args.steps, args.batch, advance
        )
    print(results.table(rows, resize.COLUMNS))
    if args.json is not None:
        names = ("task", "scheme", "bits", "density", "ranks", "seeds", "steps", "batch")
        results.write(args.json, {name: getattr(args, name) for name in names}, rows)
    return 0


def _ways(text: str) -> list[list[int]]:
    return [[size(part) for part in way.split("-")] for way in text.split(",")]
