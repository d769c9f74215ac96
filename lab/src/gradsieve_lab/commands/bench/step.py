"""`gradsieve bench step`: how long a training step takes with each sync."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path

from gradsieve.errors import ConfigError
from gradsieve.tools.cli import describe, drawable, quantity, size
from gradsieve.tools.quantities import SECONDS
from gradsieve_lab.commands.arguments import add_lab, add_syncs, check_hosts

_DESCRIPTION = """\
How long a training step takes with each way of exchanging gradients.

Trains a real model on a lab network (see `gradsieve lab run --help`), all ways round robin in one run, next
to dense and to no exchange at all, the limit. Needs root.

Hosts in a lab share this machine's cores: compare syncs in one table, not tables with each other.

columns:
  late         steps after which a gradient knows what other ranks moved; 0 is in the same step
  step_ms      of a whole training step, the median of the rounds
  vs_noop      over that of the limit in the same round; 1 is best
  vs_dense     dense's over it in the same round: how many times as fast
  ..._half     between which ratios the middle half of the rounds lies; the JSON has those of all rounds
  bytes_sent   by the busiest rank in a step, as its network interface counts them
  bits         the same for one parameter
  of_link      the same over what the link carries during a step of noop; of shaped links
  density      elements in the update over all; of what does not go dense by itself
  hidden       share of the time in collectives that passed while forward or backward computed; of steps
  recorder_ms  processor time of the recorder in a step, the busiest rank's; with --record
"""
_EXAMPLES = """\
examples:
  gradsieve bench step --rate 1gbit --syncs exdyna,topk --json step.json
  gradsieve bench step --hosts 2,4,8 --rate 1gbit --syncs exdyna,exdyna@steps:overlap=0,exdyna@paper
  gradsieve bench step --rate 100mbit --syncs exdyna --trace trace.json --timeline timeline.png
"""


def fill(parser: argparse.ArgumentParser) -> None:
    from gradsieve_lab.bench.common.idle import IDLE
    from gradsieve_lab.bench.common.workloads import WORKLOADS

    describe(parser, run, _DESCRIPTION, _EXAMPLES)
    add_lab(parser)
    add = parser.add_argument
    add("--workload", choices=(*WORKLOADS, IDLE), default="mlp", help="what is trained; elsewhere waits in "
        "each layer instead of computing; idle waits in forward and backward, as for an accelerator "
        "(default: mlp)")  # fmt: skip
    add("--compute", type=quantity(SECONDS, "300ms"), default="300ms", metavar="T", help="what a step of "
        "idle takes (default: 300ms)")  # fmt: skip
    add("--ahead", action="store_true", help="the host of idle queues steps ahead of its device")
    add("--spin", action="store_true", help="our thread of idle spins while it waits")
    add("--params", type=size, default="25e6", metavar="N", help="model size (default: 25e6)")
    add("--density", type=float, default=0.001, metavar="D", help="share that is sent (default: 0.001)")
    add_syncs(parser, default="noop,dense,fp16,powersgd,topk,exdyna")
    add("--rounds", type=size, default="5", metavar="N", help="turns for each sync (default: 5)")
    add("--json", type=Path, metavar="FILE", help="write the result there")
    add("--record", type=Path, metavar="FOLDER", help="run each of our syncs a second time, with a recorder "
        "that writes there: what it costs, and files for `gradsieve figure`")  # fmt: skip
    add("--trace", type=Path, metavar="FILE.json", help="write the last step of each of our syncs there, for "
        "chrome://tracing or Perfetto")  # fmt: skip
    add("--timeline", type=Path, metavar="FILE.png", help="draw these steps there")


def run(args: argparse.Namespace) -> int:
    from gradsieve.schemes import check_density
    from gradsieve.tools.cli import results
    from gradsieve_lab.bench.common.syncs import syncs_of
    from gradsieve_lab.bench.step import measure as step
    from gradsieve_lab.bench.step.timeline import chrome_trace
    from gradsieve_lab.bench.step.timeline_plot import plot

    check_density(args.density)
    syncs = syncs_of(args.syncs, always=step.ALWAYS)
    plan = step.Plan(
        args.hosts[0], args.rate, args.delay, args.workload, args.params, args.density, syncs, args.rounds,
        None if args.record is None else str(args.record.resolve()),
        compute=args.compute, ahead=args.ahead, spins=args.spin,
    )  # fmt: skip
    if (args.ahead or args.spin) and args.workload != "idle":
        raise ConfigError("--ahead and --spin are of an emulated device: add --workload idle")
    check_hosts(args.hosts, args.trace, args.timeline, args.record)
    if (args.trace or args.timeline or args.record) and not step.ours(plan):
        raise ConfigError(
            "only syncs of ours have a timeline or a record: add one to --syncs, such as exdyna"
        )
    drawable(args.timeline)
    for path in (args.json, args.trace, args.timeline):
        results.writable(path)
    every = []
    for hosts in args.hosts:
        rows, steps = step.measure(replace(plan, hosts=hosts))
        every += rows
        print(results.table(rows, [*step.COLUMNS, *(["recorder_ms"] if args.record else [])]))
        if (doubt := step.unclear(rows)) is not None:
            print(doubt)
    if args.json is not None:
        results.write(args.json, asdict(plan) | results.hosts_of(args.hosts), every)
    if args.trace is not None:
        args.trace.write_text(json.dumps(chrome_trace(steps)))
    if args.timeline is not None:
        plot(steps, plan, args.timeline)
    return 0
