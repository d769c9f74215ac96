"""`gradsieve bench step-plot`: several runs of `bench step` in one picture."""

from __future__ import annotations

import argparse
from pathlib import Path

from gradsieve.tools.cli import describe, drawable

_DESCRIPTION = """\
Step time against link rate, from the files of several runs of `bench step --json`.

The runs are of one workload, with the same hosts, parameters, density and delay, at different rates.
"""
_EXAMPLE = (
    "example:\n  gradsieve bench step-plot step-100mbit.json step-1gbit.json step.json --plot step.png\n"
)


def fill(parser: argparse.ArgumentParser) -> None:
    describe(parser, run, _DESCRIPTION, _EXAMPLE)
    add = parser.add_argument
    add("files", type=Path, nargs="+", metavar="FILE.json", help="results of `bench step`")
    add("--plot", type=Path, required=True, metavar="FILE.png", help="draw there")


def run(args: argparse.Namespace) -> int:
    from gradsieve.tools.cli import results
    from gradsieve_lab.bench.step.plot import plot, read

    drawable(args.plot)
    results.writable(args.plot)
    plot(read(args.files), args.plot)
    return 0
