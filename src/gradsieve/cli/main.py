"""`gradsieve`: one command, a few verbs. Each subcommand's module registers its own arguments."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from gradsieve.cli import bench, lab
from gradsieve.errors import GradsieveError


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="gradsieve", description="Sparse gradient exchange for PyTorch: measure it, on a real network."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    lab.add_parser(commands)
    bench.add_parser(commands)
    args = parser.parse_args(argv)
    try:
        return int(args.call(args))
    except GradsieveError as error:
        print(f"gradsieve: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
