"""`gradsieve bench time-to-accuracy`: how long each sync trains until it is as good as dense."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from gradsieve.tools.cli import describe, drawable, size
from gradsieve_lab.commands.arguments import add_lab, add_record, add_syncs, check_hosts

_DESCRIPTION = """\
Seconds of training until a model is as good as dense at the end of its budget.

Trains on a lab network (see `gradsieve lab run --help`), once with each way of exchanging gradients, always
from the same weights and on the same batches. Dense runs first. What counts is the mean of the last three
evaluations; the others stop when it is not worse than dense's last one, or after twice as many steps.
Evaluation is not in the seconds. Needs root.

tasks:
  mlp           Fashion-MNIST, SGD with momentum; by test accuracy
  transformer   bytes of source text, AdamW; by the loss on unseen text, the lower the better

columns, means over seeds:
  late          steps after which a gradient knows what other ranks moved; 0 is in the same step
  seconds       of training, to the target; - if a seed never got there
  steps         the same in steps
  times_dense   dense's seconds over these
  spread        standard deviation of times_dense over seeds
  reached       seeds that reached the target
  step_ms       of one training step, over the whole run
  bytes_sent    by the busiest rank in a step, as its network interface counts them
  bits          the same for one parameter
  final         accuracy or loss where the run ended
"""
_EXAMPLES = """\
examples:
  gradsieve bench time-to-accuracy --rate 1gbit --plot accuracy.png
  gradsieve bench time-to-accuracy --rate 100mbit --syncs fp16,auto,stripes:values=int4 --seeds 3
  gradsieve bench time-to-accuracy --hosts 2,4 --syncs exdyna,exdyna@steps:overlap=0,exdyna-paper@paper
  gradsieve bench time-to-accuracy --rate 100mbit --task transformer --params 1e6 --json loss.json
"""


def fill(parser: argparse.ArgumentParser) -> None:
    from gradsieve_lab.bench.tasks.sized import TASKS

    describe(parser, run, _DESCRIPTION, _EXAMPLES)
    add_lab(parser)
    add = parser.add_argument
    add("--task", choices=TASKS, default="mlp", help="what is trained (default: mlp)")
    add("--params", type=size, default="6e6", metavar="N", help="model size (default: 6e6)")
    add("--density", type=float, default=0.01, metavar="D", help="share that is sent (default: 0.01)")
    add_syncs(parser, default="dense,fp16,powersgd,auto,exdyna,spardl,oktopk")
    add("--steps", type=size, default="600", metavar="N", help="dense's budget (default: 600)")
    add("--seeds", type=size, default="1", metavar="N", help="repetitions (default: 1)")
    add_record(parser)
    add(
        "--json", type=Path, metavar="FILE", help="write the rows, their curves and how they came about there"
    )
    add("--plot", type=Path, metavar="FILE.png", help="draw accuracy or loss against seconds there")


def run(args: argparse.Namespace) -> int:
    from gradsieve.tools.cli import results
    from gradsieve_lab.bench.common.syncs import syncs_of
    from gradsieve_lab.bench.time_to_accuracy.measure import COLUMNS, Plan, measure, summary
    from gradsieve_lab.bench.time_to_accuracy.plot import plot

    syncs = syncs_of(args.syncs, always=["dense"])
    plan = Plan(
        args.hosts[0],
        args.rate,
        args.delay,
        args.task,
        args.params,
        args.density,
        syncs,
        args.steps,
        args.seeds,
        None if args.record is None else str(args.record.resolve()),
    )
    check_hosts(args.hosts, args.plot, args.record)
    drawable(args.plot)
    results.writable(args.json)
    results.writable(args.plot)
    every = []
    for hosts in args.hosts:
        runs = measure(replace(plan, hosts=hosts))
        rows = [{"hosts": hosts, **row} for row in summary(runs)]
        every += rows
        print(results.table(rows, COLUMNS))
    if args.json is not None:
        results.write(args.json, plan.facts() | results.hosts_of(args.hosts), every)
    if args.plot is not None:
        plot(plan, runs, args.plot)
    return 0
