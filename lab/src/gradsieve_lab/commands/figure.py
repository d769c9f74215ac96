"""`gradsieve figure`: the papers' figures from one's own runs."""

from __future__ import annotations

import argparse
from pathlib import Path

from gradsieve.errors import ConfigError
from gradsieve.tools.cli import describe, drawable

_DESCRIPTION = """\
Draw a figure of one of the papers from runs of your own.

Files are records (`gradsieve.record`, or --record of a bench) or the JSON of a bench, as the figure needs
them: `gradsieve figure --list` names paper, figure and the commands.
"""
_EXAMPLE = "example:\n  gradsieve figure exdyna-density rec/*.jsonl --out density.png\n"


def fill(parser: argparse.ArgumentParser) -> None:
    describe(parser, run, _DESCRIPTION, _EXAMPLE)
    add = parser.add_argument
    add("name", nargs="?", metavar="NAME", help="of the figure")
    add("files", nargs="*", type=Path, metavar="FILE", help="records or results")
    add("--list", action="store_true", help="all figures, and how their data are made")
    add("-o", "--out", type=Path, metavar="FILE.png", help="draw there")


def run(args: argparse.Namespace) -> int:
    from gradsieve.tools.cli import results
    from gradsieve_lab.bench.figures import catalogue as figures

    if args.list:
        print(figures.listing())
        return 0
    if args.name is None:
        raise ConfigError("name a figure: gradsieve figure --list has them")
    figure = figures.named(args.name)
    if not args.files or args.out is None:
        raise ConfigError(f"gradsieve figure {args.name} FILE... --out FILE.png")
    drawable(args.out)
    results.writable(args.out)
    figure.plot(args.files, args.out)
    return 0
