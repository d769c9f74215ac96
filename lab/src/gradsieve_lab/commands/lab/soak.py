"""`gradsieve lab soak`: thousands of steps on real ranks; nothing may grow."""

from __future__ import annotations

import argparse
import time
from dataclasses import astuple
from pathlib import Path
from typing import Any

from gradsieve.errors import ConfigError
from gradsieve.tools.cli import describe, results, size

_DESCRIPTION = """\
Two real ranks train a small model of several units over gloo on the loopback, behind
DistributedDataParallel, with a recorder: they evaluate, ask for metrics, flush and save now and then. Some
200 times each rank looks at itself: resident memory, objects of Python, open files, threads. The first
quarter of the steps is warm-up; from there on nothing may grow.

The exit code is 0 if all is flat, otherwise 1.
"""
_EXAMPLE = "example:\n  gradsieve lab soak --steps 20000 --json soak.json\n"
_COLUMNS = ["scheme", "rank", "measure", "first", "last", "slope", "allowed", "verdict"]


def fill(parser: argparse.ArgumentParser) -> None:
    describe(parser, run, _DESCRIPTION, _EXAMPLE)
    add = parser.add_argument
    add("--steps", type=size, default="20000", metavar="N", help="of each scheme (default: %(default)s)")
    add("--schemes", default="stripes,exdyna", metavar="LIST", help="in order (default: %(default)s)")
    add("--json", type=Path, metavar="FILE", help="write the figures there")


def run(args: argparse.Namespace) -> int:
    from gradsieve_lab.soak.rank import SETTINGS
    from gradsieve_lab.soak.run import soaked

    schemes = list(dict.fromkeys(args.schemes.split(",")))
    if unknown := [scheme for scheme in schemes if scheme not in SETTINGS]:
        raise ConfigError(f"no soak is known for {', '.join(unknown)}; there are: {', '.join(SETTINGS)}")
    results.writable(args.json)
    rows, looks, start = list[Any](), dict[str, Any](), time.monotonic()
    for scheme in schemes:
        lines, seen = soaked(scheme, args.steps)
        rows += lines
        looks[scheme] = [[astuple(look) for look in each] for each in seen]
    seconds = time.monotonic() - start
    print(results.table([row.as_json() for row in rows], _COLUMNS))
    print(f"{args.steps:,} steps of each of {', '.join(schemes)} in {seconds:.0f} s; slopes a 1,000 steps")
    if args.json is not None:
        config = {"steps": args.steps, "schemes": schemes, "seconds": round(seconds, 1), "looks": looks}
        results.write(args.json, config, [row.as_json() for row in rows])
    return 0 if all(row.is_good for row in rows) else 1
