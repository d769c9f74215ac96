"""`gradsieve bench`: measurements, each with its own sub-command."""

from __future__ import annotations

import argparse
from pathlib import Path

from gradsieve.cli import (
    bench_accuracy,
    bench_bits,
    bench_collectives,
    bench_elastic,
    bench_exchange,
    bench_hsdp,
    bench_lost,
    bench_memory,
    bench_overhead,
    bench_plan,
    bench_resize,
    bench_schemes,
    bench_step,
    bench_time_to_accuracy,
)
from gradsieve.cli.arguments import Commands, add_command, drawable, schemes, size, worlds
from gradsieve.cli.progress import progress

_TRAFFIC = """\
How many words each scheme moves as the number of ranks grows.

Runs real steps of P virtual ranks in this one process, on skewed gradients cut into the tensors of a real
model, and counts the 4-byte words of the busiest rank in one step, beside the published formula. No network
is involved: these are bytes, not seconds. `gradsieve bench step` measures seconds.

columns:
  words                sent or received, whichever is more, of one collective after the other; of the busiest
                       rank in the worst step since the scheme settled
  formula_words        the published cost at the count and the imbalance seen in that step
  of_formula           words over formula_words
  times_k              words over k (P-1)/P, k being the elements to send
  mean_times_k         the same of the mean of the last 32 steps, a period of Ok-Topk with its exact step
  exact_words          the most in a step that evaluates thresholds anew, left out of words (Ok-Topk)
  rounds               messages one after the other, by the best known algorithm for each collective
  formula_rounds       the published latency
  settled_after        steps until words stay within a tenth of the formula (Ok-Topk: between 2k and 6k);
                       - for never
  density, imbalance   elements in the update over all; longest selection over the mean,
                       before any row is cut
"""

_TRAFFIC_EXAMPLE = """\
examples:
  gradsieve bench traffic --schemes topk,exdyna --world 2,16,128 --params 1e6 --plot traffic.png
  gradsieve bench traffic --schemes deft,exdyna,exdyna-paper --world 16,256 --model transformer
"""


def add_parser(subparsers: Commands) -> None:
    bench = subparsers.add_parser("bench", help="measure schemes against dense and against the limit")
    commands = bench.add_subparsers(metavar="COMMAND", required=True)
    bench_step.add_parser(commands)
    bench_overhead.add_parser(commands)
    bench_exchange.add_parser(commands)
    bench_hsdp.add_parser(commands)
    bench_plan.add_parser(commands)
    bench_collectives.add_parser(commands)
    bench_time_to_accuracy.add_parser(commands)
    _add_traffic(commands)
    bench_schemes.add_parser(commands)
    bench_bits.add_parser(commands)
    bench_memory.add_parser(commands)
    bench_lost.add_parser(commands)
    bench_accuracy.add_parser(commands)
    bench_resize.add_parser(commands)
    bench_elastic.add_parser(commands)


def _add_traffic(commands: Commands) -> None:
    from gradsieve.bench.traffic import MODELS

    summary = "words moved as the number of ranks grows, on virtual ranks"
    add = add_command(commands, "traffic", run_traffic, summary, _TRAFFIC, _TRAFFIC_EXAMPLE).add_argument
    add(
        "--schemes",
        type=schemes,
        default="topk,micro,exdyna",
        metavar="LIST",
        help="names with commas between them, or all; settings as in gtopk:paper=true (default: %(default)s)",
    )
    add(
        "--world",
        type=worlds,
        default="2,4,16,64,256,1024",
        metavar="LIST",
        help="numbers of ranks (default: %(default)s)",
    )
    add("--model", choices=MODELS, default="transformer", help="whose tensors the gradient is cut into "
        "(default: transformer)")  # fmt: skip
    add("--params", type=size, default="1e6", metavar="N", help="about its size (default: 1e6)")
    add("--density", type=float, default=0.01, metavar="D", help="share that is sent (default: 0.01)")
    add("--json", type=Path, metavar="FILE", help="write the rows and how they came about there")
    add("--plot", type=Path, metavar="FILE.png", help="draw words against ranks there")


def run_traffic(args: argparse.Namespace) -> int:
    from gradsieve.bench import traffic
    from gradsieve.bench.common import results
    from gradsieve.types import check_density

    check_density(args.density)
    drawable(args.plot)
    results.writable(args.json)
    results.writable(args.plot)
    sizes = traffic.layers(args.model, args.params)
    cases = [
        traffic.Case(name, world, sum(sizes), args.density, sizes)
        for world in args.world
        for name in args.schemes
    ]
    with progress(sum(case.steps * case.work for case in cases)) as advance:
        rows = traffic.measure_all(cases, advance)
    print(results.table(rows, traffic.COLUMNS))
    if args.json is not None:
        config = {
            "schemes": args.schemes,
            "world": args.world,
            "model": args.model,
            "params": sum(sizes),
            "layers": len(sizes),
            "density": args.density,
        }
        results.write(args.json, config, rows)
    if args.plot is not None:
        traffic.plot(rows, sum(sizes), args.density, args.plot)
    return 0
