"""`gradsieve bench traffic`: words that each scheme moves as the number of ranks grows."""

from __future__ import annotations

import argparse
from pathlib import Path

from gradsieve.tools.cli import describe, drawable, progress, schemes, size
from gradsieve_lab.commands.arguments import worlds

_DESCRIPTION = """\
How many words each scheme moves as the number of ranks grows.

Runs real steps of P virtual ranks in this one process, on skewed gradients cut into the tensors of a real
model, and counts the 4-byte words of the busiest rank in one step, next to the published formula. No network
is involved: these are bytes, not seconds. `gradsieve bench step` measures seconds.

columns:
  words                sent or received, whichever is more, of one collective after the other; of the busiest
                       rank in the worst step since the scheme converged
  formula_words        the published cost at the count and the imbalance seen in that step
  of_formula           words over formula_words
  times_k              words over k (P-1)/P, k being the elements to send
  mean_times_k         the same of the mean of the last 32 steps, a period of Ok-Topk with its exact step
  exact_words          the most in a step that evaluates thresholds again, left out of words (Ok-Topk)
  rounds               messages one after the other, by the best known algorithm for each collective
  formula_rounds       the published latency
  settled_after        steps until words stay within a tenth of the formula (Ok-Topk: between 2k and 6k);
                       - for never
  steps, ended         how many were run, and why no more. ExDyna with its balance and published rules with
                       partitions run until the means of imbalance and words over 100 steps are within 1 % in
                       three windows on end (settled) or for 1,500 steps, fewer where ranks times parameters
                       exceed 64 million (cap); words are those of the last 100. Others: 40 or 1 (fixed)
  density, imbalance   elements in the update over all; longest selection over the mean,
                       before any row is cut
"""

_EXAMPLES = """\
examples:
  gradsieve bench traffic --schemes topk,exdyna --world 2,16,128 --params 1e6 --plot traffic.png
  gradsieve bench traffic --schemes deft,exdyna,exdyna-paper --world 16,256 --model transformer
"""


def fill(parser: argparse.ArgumentParser) -> None:
    from gradsieve_lab.bench.traffic import MODELS

    describe(parser, run, _DESCRIPTION, _EXAMPLES)
    add = parser.add_argument
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


def run(args: argparse.Namespace) -> int:
    from gradsieve.schemes import check_density
    from gradsieve.tools.cli import results
    from gradsieve_lab.bench import traffic

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
