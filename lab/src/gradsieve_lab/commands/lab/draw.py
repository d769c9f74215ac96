"""`gradsieve lab draw`: the picture of a network file."""

from __future__ import annotations

import argparse
from pathlib import Path

from gradsieve.tools.cli import describe, drawable
from gradsieve.tools.results import writable
from gradsieve_lab.emulation.topology import read

_DESCRIPTION = """\
Draw a network file: hosts, switches, and links with their rates and delays. The file is checked as
`gradsieve lab run --network` checks it; no root is needed.
"""
_EXAMPLE = """\
example:
  gradsieve lab draw examples/networks/two-sites.toml -o two-sites.png
"""


def fill(parser: argparse.ArgumentParser) -> None:
    describe(parser, run, _DESCRIPTION, _EXAMPLE)
    parser.add_argument("network", type=Path, metavar="FILE", help="hosts, switches and links in TOML")
    parser.add_argument(
        "-o", "--out", type=Path, metavar="FILE.png", help="PNG or SVG (default: next to it, FILE.png)"
    )


def run(args: argparse.Namespace) -> int:
    topology = read(args.network)
    out = args.out or args.network.with_suffix(".png")
    drawable(out)
    writable(out)
    from gradsieve_lab.emulation.draw import draw

    draw(topology, out, args.network.stem)
    print(out)
    return 0
