"""`gradsieve lab fuzz`: hostile bytes by the million."""

from __future__ import annotations

import argparse
from pathlib import Path

from gradsieve.tools.cli import describe, progress, size

_DESCRIPTION = """\
Hand altered messages in wherever a peer's bytes are read: each must be read as something lawful or refused.

Messages of every scheme and codec are made by real ranks, virtual ones, and altered with knowledge of what is
in them. They are read in processes that can have 3 MiB and twice the message more memory than before; one
that crashes, hangs for 20 s, wants more memory or raises anything but a refusal is a finding.

families:
  read by ...   what reads bytes, called by itself
  exchanges     a whole step of one rank, with one reply of it altered
  pipelines     a whole exchange of a pipeline, with what is piggybacked, and what is applied

The exit code is 0 without findings, otherwise 1; each finding is printed with the command that repeats it.
After Ctrl-C come the figures so far.
"""
_EXAMPLE = """\
examples:
  gradsieve lab fuzz --target frames --count 1e6 --seed 1
  gradsieve lab fuzz --target frames --seed 1 --case 8231
  gradsieve lab fuzz --target frames --count 1e6 --guided     (needs pip install 'gradsieve-lab[fuzz]')
"""


def fill(parser: argparse.ArgumentParser) -> None:
    describe(parser, run, _DESCRIPTION, _EXAMPLE)
    add = parser.add_argument
    add("--target", default="frames", metavar="NAME", help="what is read (default: frames)")
    add("--count", type=size, default="100000", metavar="N", help="messages (default: 100000)")
    add("--seed", type=int, default=0, metavar="N", help="another one, other messages (default: 0)")
    add("--case", type=int, metavar="N", help="only this message, with the traceback of what it does")
    add("--guided", action="store_true", help="let atheris look for messages that reach new code")
    add("--json", type=Path, metavar="FILE", help="write the figures there")


def run(args: argparse.Namespace) -> int:
    from gradsieve.tools.cli import results
    from gradsieve_lab.fuzz.run import fuzz

    if args.case is not None:
        return _repeat(args.target, args.seed, args.case)
    if args.guided:
        from gradsieve_lab.fuzz.guided import guide

        return guide(args.target, args.count, args.seed)
    results.writable(args.json)
    with progress(args.count) as advance:
        report = fuzz(args.target, args.count, args.seed, advance)
    rows = [
        {"family": family, **kinds, "frames": sum(kinds.values())} for family, kinds in report.seen.items()
    ]
    print(results.table(rows, ["family", "frames", "read", "refused", "found"]))
    rate = report.frames / report.seconds
    print(f"{report.frames:,} messages in {report.seconds:.0f} s ({rate:,.0f} a second)")
    for finding in report.findings:
        print(f"FOUND {finding.what}")
        print(f"  gradsieve lab fuzz --target {args.target} --seed {args.seed} --case {finding.case}")
    if args.json is not None:
        config = {"target": args.target, "count": args.count, "seed": args.seed, "seconds": report.seconds}
        config |= {"frames": report.frames, "interrupted": report.interrupted}
        findings = [{"case": finding.case, "what": finding.what} for finding in report.findings]
        results.write(args.json, {**config, "findings": findings}, rows)
    if report.findings:
        return 1
    return 130 if report.interrupted else 0


def _repeat(target: str, seed: int, number: int) -> int:
    from gradsieve.testing.entry_points.entry_point import REFUSED
    from gradsieve_lab.fuzz.targets import Cases

    _, entry, frame = Cases(target, seed).case(number)
    print(f"{entry.name}: {bytes(frame).hex()}")
    try:
        entry.enter(frame)
    except REFUSED as error:
        print(f"refused: {type(error).__name__}: {error}")
    else:
        print("read")
    return 0
