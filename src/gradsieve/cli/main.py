"""`gradsieve`: one command, a few verbs. Each subcommand's module registers its own arguments."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence

from gradsieve.cli import bench, doctor, figure, lab, plan, report, simulate, watch
from gradsieve.errors import GradsieveError


def main(argv: Sequence[str] | None = None) -> int:
    _hear_interruption()
    try:
        args = _parser().parse_args(argv)  # which loads torch, and takes a while
        return int(args.call(args))
    except GradsieveError as error:
        print(f"gradsieve: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gradsieve", description="Sparse gradient exchange for PyTorch: measure it, on a real network."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    doctor.add_parser(commands)
    plan.add_parser(commands)
    lab.add_parser(commands)
    bench.add_parser(commands)
    simulate.add_parser(commands)
    figure.add_parser(commands)
    watch.add_parser(commands)
    report.add_parser(commands)
    return parser


def _hear_interruption() -> None:
    """Also where a script started this in its background: shells have such a process ignore SIGINT, and
    whoever sends it to this process alone means it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


if __name__ == "__main__":
    sys.exit(main())
