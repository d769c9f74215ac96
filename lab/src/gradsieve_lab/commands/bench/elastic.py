"""`gradsieve bench elastic`: a training inside torchft whose replicas are killed and stopped."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

from gradsieve.errors import ConfigError
from gradsieve.tools.cli import describe, progress, size

_DESCRIPTION = """\
Whether a training inside torchft that loses replicas ends as one that does not.

Trains a task twice on real processes, with a real torchft_lighthouse: undisturbed, and with one replica
killed (SIGKILL, and started again) or stopped (SIGSTOP, and continued later) every so many steps. The others
go on; who comes back takes the model of a peer. What was killed takes along its residual, whose norm, as of
its last exchange, is added up. What was stopped keeps it.

columns:
  final       the metric after the last step and a flush: loss on unseen data, or test accuracy
  back        replicas that were hit and have taken a step again
  failed      exchanges that did not count at once, of the replica with most; each was made again
  lost_mass   sum over the dead of the norms of their residuals
  gone_s      seconds from a fault until the others are two steps further, computing included; the median
  alike       whether all replicas ended with the same bits

The exit code is 1 if replicas differ at the end, or the loss is more than 2 % above the undisturbed one.
"""
_EXAMPLE = (
    "example:\n  gradsieve bench elastic --replicas 4 --steps 300 --kill-every 30 --json elastic.json\n"
)
WITHIN = 0.02


def fill(parser: argparse.ArgumentParser) -> None:
    describe(parser, run, _DESCRIPTION, _EXAMPLE)
    add = parser.add_argument
    add("--task", default="transformer", metavar="NAME", help="what is trained (default: %(default)s)")
    add("--replicas", type=size, default="4", metavar="N", help="processes (default: 4)")
    add("--steps", type=size, default="300", metavar="N", help="of a training (default: 300)")
    add("--kill-every", type=size, metavar="N", help="steps between two deaths")
    add("--stop-every", type=size, metavar="N", help="steps between two stops")
    add("--stop-seconds", type=float, default=2.0, metavar="SECONDS", help="how long (default: %(default)s)")
    add("--bits", type=float, metavar="B", help="a budget a parameter and step (default: 1)")
    add("--scheme", default="exdyna", metavar="NAME", help="with a density: which (default: %(default)s)")
    add("--density", type=float, metavar="D", help="share that is sent, where there is no budget")
    add(
        "--deadline",
        type=float,
        default=5.0,
        metavar="SECONDS",
        help="of an exchange (default: %(default)s s)",
    )
    add("--seed", type=int, default=0, metavar="N", help="of weights and examples (default: 0)")
    add("--json", type=Path, metavar="FILE", help="write the rows and how they came about there")


def run(args: argparse.Namespace) -> int:
    from gradsieve.tools.cli import results

    if importlib.util.find_spec("torchft") is None:
        raise ConfigError("this needs torchft: pip install 'gradsieve[torchft]'")
    if args.replicas < 2:
        raise ConfigError(f"--replicas is {args.replicas}; there have to be 2 or more")
    if args.bits is not None and args.density is not None:
        raise ConfigError("give --bits or --density, and not both")
    results.writable(args.json)
    from gradsieve_lab.bench.elastic import measure as elastic
    from gradsieve_lab.bench.elastic.replica import Plan
    from gradsieve_lab.bench.tasks.training import TASKS

    settings = {"scheme": args.scheme, "density": args.density}
    if args.density is None:
        settings = {"bits": args.bits or 1.0}
    plan = Plan(
        args.task,
        args.replicas,
        args.steps,
        settings,
        args.seed,
        args.deadline,
        max(1, args.replicas // 2),
    )
    faults = elastic.Faults(args.kill_every or 0, args.stop_every or 0, args.stop_seconds)
    with progress(2 * args.steps) as advance:
        rows = [
            elastic.measure(plan, each, lambda steps: advance(steps, args.task))
            for each in (elastic.Faults(), faults)
        ]
    print(results.table(rows, elastic.COLUMNS))
    above = rows[1]["final"] / rows[0]["final"] - 1.0
    print(f"{100 * above:+.2f} % against the undisturbed training; lost mass {rows[1]['lost_mass']:.4g}:")
    for loss in rows[1]["losses"]:
        print(f"  replica {loss['name']}: {loss['waiting']:.4g}, as of exchange {loss['exchange']}")
    if args.json is not None:
        names = ("task", "replicas", "steps", "kill_every", "stop_every", "stop_seconds", "deadline", "seed")
        config = {name: getattr(args, name) for name in names} | settings
        results.write(args.json, config, [row | {"above": above} for row in rows])
    worse = above if TASKS[plan.task].metric == "loss" else -above
    return 0 if worse <= WITHIN and all(row["alike"] for row in rows) else 1
