"""`gradsieve lab run`: one command on every host of a network that exists while it runs."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from gradsieve.errors import ConfigError, GradsieveError
from gradsieve.tools.cli import describe
from gradsieve_lab.emulation import Lab
from gradsieve_lab.emulation.topology import Topology, read

_DESCRIPTION = """\
Run a command on every host of a real multi-host network on this one Linux machine.

Each host is a network namespace with its own address on eth0; a switch joins them, and links have
the rate and delay you ask for. With --network there are several switches, and every link is as its
file says. The command finds RANK, WORLD_SIZE, MASTER_ADDR and the rest of what torchrun sets, one
process a host. All of it is removed at the end, also after Ctrl-C. Needs root.
"""

_EXAMPLES = """\
examples:
  gradsieve lab run --hosts 4 --rate 1gbit -- python train.py
  gradsieve lab run --hosts 2 --rate 100mbit --delay 5ms --timeout 600 -- python train.py --epochs 1
  gradsieve lab run --network examples/networks/two-sites.toml -- python train.py

The exit code is 0 if every rank's is 0, otherwise that of the rank that failed first (128 + the number
of the signal, if one killed it).
"""


def fill(parser: argparse.ArgumentParser) -> None:
    describe(parser, run, _DESCRIPTION, _EXAMPLES)
    parser.usage = "%(prog)s [options] -- CMD [ARG ...]"
    add = parser.add_argument
    add("--hosts", type=int, metavar="N", help="how many hosts, 1 to 64 (default: 4)")
    add("--rate", metavar="R", help="of each link, e.g. 100mbit or 1gbit (default: unshaped)")
    add("--delay", metavar="D", help="one way, e.g. 5ms or 250us (default: none)")
    add("--network", type=Path, metavar="FILE", help="hosts, switches and links in TOML, instead of these")
    add("--timeout", type=float, metavar="SECONDS", help="end all ranks after this long")
    add("--json", type=Path, metavar="FILE", help="write settings, exit codes and seconds there")
    add("command", nargs=argparse.REMAINDER, metavar="CMD", help="what each host runs")


def run(args: argparse.Namespace) -> int:
    # argparse keeps the first `--` of a remainder.
    command: list[str] = args.command[1:] if args.command[:1] == ["--"] else args.command
    try:
        if args.json is not None:
            args.json.touch()  # a path that cannot be written should be known before the run, not after
        with Lab(_hosts(args), args.rate, args.delay) as lab:
            start = time.monotonic()
            exit_codes = lab.run(command, timeout=args.timeout)
            seconds = time.monotonic() - start
    except (GradsieveError, OSError) as error:
        print(f"gradsieve lab: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    if args.json is not None:
        settings = {"hosts": len(lab.addresses), "rate": args.rate, "delay": args.delay}
        if args.network is not None:
            settings |= {"network": args.network.read_text()}
        args.json.write_text(json.dumps({**settings, "exit_codes": exit_codes, "seconds": seconds}) + "\n")
    if lab.first_failure is None:
        return 0
    code = exit_codes[lab.first_failure]
    return code if code > 0 else 128 - code


def _hosts(args: argparse.Namespace) -> int | Topology:
    if args.network is None:
        hosts: int = 4 if args.hosts is None else args.hosts
        return hosts
    if any(given is not None for given in (args.hosts, args.rate, args.delay)):
        raise ConfigError("a network file has hosts, rates and delays: leave --hosts, --rate and --delay out")
    return read(args.network)
