"""`gradsieve bench race`: seconds until a GPT is as good as dense makes it, on slow links."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from gradsieve.errors import ConfigError
from gradsieve.tools.cli import describe, drawable, progress, size

if TYPE_CHECKING:
    from gradsieve_lab.bench.race.rules import Plan

_DESCRIPTION = """\
Seconds of training until a GPT is as good as dense makes it within its budget, over slow links.

Rules: docs/race.md. Every entry is a command that is started on every host of a lab network (see
`gradsieve lab run --help`), with the same words after it, and prints a line of JSON an evaluation. Each run
leaves a log; one that is there is not run again. The table is made from the logs. Needs root to race.

entries:
  dense       plain DDP; sets the target, and always runs first
  fp16        DDP with torch's hook
  powersgd    DDP with torch's hook, of rank 2
  local-sgd   torch's post-local SGD
  diloco      torchft's own
  auto        gradsieve, as a user gets it who asks for nothing
  NAME=CMD    whatever else can be started by a command

columns, means over seeds:
  seconds     of training, to the target, where all seeds reached it
  spread      their standard deviation
  times_dense dense's seconds over these
  step_ms     of one training step, over the whole run
"""
_EXAMPLES = """\
examples:
  python examples/gpt/prepare.py text
  gradsieve bench race --text text --logs benchmarks/race --plot race.png
  gradsieve bench race --text text --logs mine --entries "auto,mine=python train_mine.py" --links 100mbit
  gradsieve bench race --table --logs benchmarks/race
"""


def fill(parser: argparse.ArgumentParser) -> None:
    from gradsieve_lab.bench.race.rules import LINKS, NAMES

    describe(parser, run, _DESCRIPTION, _EXAMPLES)
    add = parser.add_argument
    add("--logs", type=Path, required=True, metavar="FOLDER", help="a log for each run")
    add("--text", type=Path, metavar="FOLDER", help="that examples/gpt/prepare.py has written")
    add("--entries", default=",".join(NAMES), metavar="LIST", help="who races (default: %(default)s)")
    add("--links", default=",".join(LINKS), metavar="LIST", help="rate+delay (default: %(default)s)")
    add("--seeds", type=size, default="3", metavar="N", help="repetitions (default: 3)")
    add("--size", default="1M", metavar="NAME", help="of examples/gpt (default: 1M)")
    add("--steps", type=size, default="600", metavar="N", help="dense's budget (default: 600)")
    add("--hosts", type=size, default="4", metavar="N", help="in the lab (default: 4)")
    add("--limit", type=float, default=900.0, metavar="SECONDS", help="of training (default: 900)")
    add("--table", action="store_true", help="only make the table of the logs that are there")
    add("--plot", type=Path, metavar="FILE.png", help="draw loss against seconds there")


def run(args: argparse.Namespace) -> int:
    from gradsieve.tools.cli import results
    from gradsieve_lab.bench.race import logs, rules

    drawable(args.plot)
    results.writable(args.plot)
    if not args.table:
        if args.text is None:
            raise ConfigError("--text is missing: python examples/gpt/prepare.py text")
        plan = rules.Plan(args.text, args.size, args.hosts, args.steps, args.limit)
        entries = rules.in_order([rules.entry(text) for text in args.entries.split(",")])
        _race(plan, entries, args)
    found = logs.read_all(args.logs)
    print(results.table(logs.table(found), logs.COLUMNS))
    if args.plot is not None:
        from gradsieve_lab.bench.race.plot import plot

        plot(found, args.plot)
    return 0


def _race(plan: Plan, entries: dict[str, list[str]], args: argparse.Namespace) -> None:
    from gradsieve_lab.bench.race import measure

    links = args.links.split(",")
    total = sum(map(plan.most_steps, entries)) * len(links) * args.seeds
    with progress(total) as advance:
        measure.race(plan, entries, links, args.seeds, args.logs, advance)
