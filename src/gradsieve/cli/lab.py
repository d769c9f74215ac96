"""`gradsieve lab run`: one command on every host of a network that exists while it runs."""

import argparse
import json
import sys
import time
from pathlib import Path

from gradsieve.cli import lab_chaos, lab_faults, lab_fuzz, lab_soak
from gradsieve.errors import GradsieveError
from gradsieve.lab import Lab

_DESCRIPTION = """\
Run a command on every host of a real multi-host network on this one Linux machine.

Each host is a network namespace with its own address on eth0; a switch joins them, and links have
the rate and delay you ask for. The command finds RANK, WORLD_SIZE, MASTER_ADDR and the rest of what
torchrun sets, one process a host. All of it is removed at the end, also after Ctrl-C. Needs root.
"""

_EXAMPLES = """\
examples:
  gradsieve lab run --hosts 4 --rate 1gbit -- python train.py
  gradsieve lab run --hosts 2 --rate 100mbit --delay 5ms --timeout 600 -- python train.py --epochs 1

The exit code is 0 if every rank's is 0, otherwise that of the rank that failed first (128 + the number
of the signal, if one killed it).
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    lab = subparsers.add_parser("lab", help="a real multi-host network on one Linux machine")
    commands = lab.add_subparsers(metavar="COMMAND", required=True)
    run = commands.add_parser(
        "run",
        help="run a command on every host",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [options] -- CMD [ARG ...]",
    )
    run.add_argument("--hosts", type=int, default=4, metavar="N", help="how many hosts, 1 to 64 (default: 4)")
    run.add_argument("--rate", metavar="R", help="of each link, e.g. 100mbit or 1gbit (default: unshaped)")
    run.add_argument("--delay", metavar="D", help="one way, e.g. 5ms or 250us (default: none)")
    run.add_argument("--timeout", type=float, metavar="SECONDS", help="end all ranks after this long")
    run.add_argument("--json", type=Path, metavar="FILE", help="write settings, exit codes and seconds there")
    run.add_argument("command", nargs=argparse.REMAINDER, metavar="CMD", help="what each host runs")
    run.set_defaults(call=run_lab)
    lab_faults.add_parsers(commands)
    lab_fuzz.add_parser(commands)
    lab_chaos.add_parsers(commands)
    lab_soak.add_parser(commands)


def run_lab(args: argparse.Namespace) -> int:
    # argparse keeps the first `--` of a remainder.
    command: list[str] = args.command[1:] if args.command[:1] == ["--"] else args.command
    try:
        if args.json is not None:
            args.json.touch()  # a path that cannot be written should be known before the run, not after
        with Lab(args.hosts, args.rate, args.delay) as lab:
            start = time.monotonic()
            exit_codes = lab.run(command, timeout=args.timeout)
            seconds = time.monotonic() - start
    except (GradsieveError, OSError) as error:
        print(f"gradsieve lab: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    if args.json is not None:
        settings = {"hosts": args.hosts, "rate": args.rate, "delay": args.delay}
        args.json.write_text(json.dumps({**settings, "exit_codes": exit_codes, "seconds": seconds}) + "\n")
    if lab.first_failure is None:
        return 0
    code = exit_codes[lab.first_failure]
    return code if code > 0 else 128 - code
