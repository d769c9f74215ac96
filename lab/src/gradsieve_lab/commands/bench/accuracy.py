"""`gradsieve bench accuracy`: trainings to the end, next to dense."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gradsieve.errors import ConfigError
from gradsieve.tools.cli import describe, drawable, progress, schemes, size
from gradsieve_lab.commands.arguments import add_record, densities, tasks, worlds

if TYPE_CHECKING:
    from gradsieve_lab.bench.accuracy.measure import Case

_DESCRIPTION = """\
Whether a model ends as good as it would with dense exchange.

Trains whole tasks for each sync, exchange settings, density and seed, on virtual ranks that go through the
same pipeline as real ones. Rivals have neither exchange settings nor density but settings of their own
(docs/rivals.md); torch's hooks among them, fp16 and powersgd, train in as many real processes. On the task
`documentation` nothing of gradsieve was chosen: it runs only by its name.
Hyper-parameters were tuned for dense and are the same for all, but for the multiples of the learning rate
that --rates asks for. Every training leaves a file in the folder and is not run again when it is there.

columns:
  final       the metric after the last step: test accuracy, or loss on unseen data; mean over seeds, and
              none where a training diverged
  spread      its standard deviation over seeds
  gap         how much worse than dense with the same seeds, at the task's own rate: points of accuracy, or
              per cent of the loss
  fidelity    energy that an update captures, over that of the best update with as many elements
  age         steps since an element was last sent, mean over those sent
  waiting     norm of the residual over that of what is sent
  apart       largest difference of an element between two ranks' own models, mean over looks
  bytes       sent or received by the busiest rank, whichever is more, a step, the flush at the end included
  bits        the same for one parameter
  unflushed   the metric of the model that all ranks share before the flush at the end; and the bits so far
  rate        times the task's learning rate
  trials      trainings in the folder, with the first seed, of the same sync with any settings and rate
"""

_EXAMPLES = """\
examples:
  gradsieve bench accuracy --tasks mlp --densities 0.01 --seeds 1 --folder runs
  gradsieve bench accuracy --tasks cnn --treatments default,paper,gradients:momentum=masked --folder runs
  gradsieve bench accuracy --tasks transformer --syncs dense,local-sgd:every=8,diloco:every=32,sparseloco \
      --rates 0.5,1,2 --own-rates --folder runs
  gradsieve bench accuracy --tasks lstm --syncs dense,exdyna,powersgd:rank=4 --folder runs --plot lstm.png
"""


def fill(parser: argparse.ArgumentParser) -> None:
    describe(parser, run, _DESCRIPTION, _EXAMPLES)
    add = parser.add_argument
    add("--tasks", type=tasks, default="all", metavar="LIST", help="to train (default: all but the held-out)")
    add(
        "--syncs",
        type=_syncs,
        metavar="LIST",
        help="schemes (all: every one), and rivals: fp16, powersgd:rank=N, local-sgd:every=H, "
        "diloco:every=H and others (docs/rivals.md; default: dense,exdyna, with --bits dense,stripes); "
        "exdyna@paper has exchange settings of its own",
    )
    add(
        "--treatments",
        type=lambda text: text.split(","),
        default="default",
        metavar="LIST",
        help="exchange settings: default, paper (not the rules, which are schemes such as exdyna-paper), "
        "steps or gradients with settings (default: %(default)s)",
    )
    add(
        "--densities",
        type=densities,
        default="0.01,0.001",
        metavar="LIST",
        help="shares that are sent (default: %(default)s)",
    )
    add(
        "--bits",
        type=lambda text: [float(each) for each in text.split(",")],
        default=[],
        metavar="LIST",
        help="budgets in bits a parameter and step, which stripes spend, instead of densities",
    )
    add(
        "--rates",
        type=lambda text: [float(each) for each in text.split(",")],
        default="1",
        metavar="LIST",
        help="multiples of the task's learning rate, each a training of its own (default: %(default)s)",
    )
    add(
        "--own-rates",
        action="store_true",
        help="each sync at the best of --rates, which the first seed tries; other seeds have that one only",
    )
    add("--world", type=worlds, default="4", metavar="LIST", help="numbers of ranks (default: 4)")
    add("--seeds", type=size, default="3", metavar="N", help="trainings of each kind (default: 3)")
    add("--own-shards", action="store_true", help="each rank has its own kinds of data (default: mixed)")
    add("--steps", type=size, metavar="N", help="shorter trainings (default: as long as the task is)")
    add("--batch", type=size, metavar="N", help="examples in a step, over all ranks (default: the task's)")
    add("--jobs", type=size, default="1", metavar="N", help="trainings at a time (default: 1)")
    add("--folder", type=Path, required=True, metavar="FOLDER", help="where trainings are kept")
    add_record(parser)
    add("--json", type=Path, metavar="FILE", help="write the rows and how they came about there")
    add("--plot", type=Path, metavar="FILE.png", help="draw the curves there")


def run(args: argparse.Namespace) -> int:
    from gradsieve.schemes import check_density, parse
    from gradsieve.testing import parse_exchange
    from gradsieve.tools.cli import results
    from gradsieve_lab.bench.accuracy import measure as accuracy
    from gradsieve_lab.bench.accuracy.plot import plot

    for density in args.densities:
        check_density(density)
    if any(not bits > 0 for bits in args.bits):
        raise ConfigError("--bits are budgets above 0")
    if any(not rate > 0 for rate in args.rates):
        raise ConfigError("--rates are multiples above 0")
    syncs = args.syncs or ["dense", "stripes" if args.bits else "exdyna"]
    for exchange in [*args.treatments, *(own for _, at, own in (s.partition("@") for s in syncs) if at)]:
        parse_exchange(exchange, parse("exdyna"))
    drawable(args.plot)
    if args.json is not None and args.json.resolve().parent == args.folder.resolve():
        raise ConfigError(f"{args.folder} is for trainings: write the rows to another folder")
    results.writable(args.json)
    results.writable(args.plot)
    todo = accuracy.cases(
        args.tasks,
        syncs,
        args.treatments,
        args.densities,
        args.bits,
        args.world,
        args.seeds,
        not args.own_shards,
        args.steps,
        args.batch,
        args.rates,
    )
    accuracy.read(args.folder)  # what cannot be read is said now, and not after hours of training
    if args.own_rates:
        _train([case for case in todo if case.seed == 0], args)
        todo = accuracy.at_own_rates(todo, accuracy.read(args.folder))
    _train(todo, args)
    wanted = {case.file for case in todo}
    tried = accuracy.read(args.folder)
    found = [(case, course) for case, course in tried if case.file in wanted]
    rows = accuracy.rows(found, tried)
    print(results.table(rows, accuracy.COLUMNS))
    if args.json is not None:
        results.write(args.json, {"folder": str(args.folder)}, rows)
    if args.plot is not None:
        plot(found, args.plot)
    return 0


def _train(todo: Sequence[Case], args: argparse.Namespace) -> None:
    """Those that are not there yet."""
    from gradsieve_lab.bench.accuracy import measure as accuracy

    missing = accuracy.missing(todo, args.folder, args.record)
    with progress(sum(case.work for case in missing)) as advance:
        accuracy.measure(missing, args.folder, args.jobs, advance, args.record)


def _syncs(text: str) -> list[str]:
    """Schemes and rivals: `dense,exdyna,powersgd:rank=4,diloco`."""
    from gradsieve_lab.bench.accuracy import rivals

    found: list[str] = []
    for each in text.split(","):
        if not rivals.is_rival(each):
            name, at, exchange = each.partition("@")
            found += [name + at + exchange for name in schemes(name)]
            continue
        try:
            rivals.parse(each)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        found.append(each)
    return list(dict.fromkeys(found))
