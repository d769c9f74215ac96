"""`gradsieve lab kill-matrix`: real ranks die and stall at every op of a step; survivors are checked."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradsieve.tools.cli import describe, progress, results, schemes

if TYPE_CHECKING:
    from gradsieve_lab.faults.verdicts import Line

_DESCRIPTION = """\
Each op of a scheme's step x {SIGKILL, SIGSTOP, SIGTERM, exit 0, exit 1, abort} x each of three ranks, on real
processes over gloo on the loopback. Every survivor must exit with a PeerError that names the rank, the step
and the op, within 6 s of a death and within the deadline and 1 s of a stall; must have kept the state it had
before the step, the same bits as in an undisturbed run; and must leave no thread and no connection behind.

One line of JSON a fault, the last line sums them up. The exit code is 0 if all went as it must.
"""
_EXAMPLE = "example:\n  gradsieve lab kill-matrix --schemes stripes,exdyna --json matrix.json\n"


def fill(parser: argparse.ArgumentParser) -> None:
    describe(parser, run, _DESCRIPTION, _EXAMPLE)
    parser.add_argument(
        "--schemes",
        type=schemes,
        default="stripes,exdyna,oktopk,spardl",
        metavar="LIST",
        help="whose steps (default: %(default)s)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the lines there")


def run(args: argparse.Namespace) -> int:
    from gradsieve_lab.faults.matrix import Matrix

    results.writable(args.json)
    matrix, lines, start = Matrix(), list[Any](), time.monotonic()
    cleans = [matrix.clean(scheme) for scheme in args.schemes]
    faults = [matrix.cases(clean) for clean in cleans]
    with Lines(args.json) as out, progress(sum(map(len, faults))) as advance:
        for clean, own in zip(cleans, faults, strict=True):
            for line in matrix.run(clean, own):
                lines.append(line)
                out.write(line.as_json())
                advance(1, f"{clean.scheme}, {line.kind} at op {line.op} of rank {line.rank}")
                if line.outcome != "named":
                    print(f"wrong: {line}", file=sys.stderr)
        return _end(out, lines, time.monotonic() - start)


def _end(out: Lines, lines: list[Line], seconds: float) -> int:
    from gradsieve_lab.faults.verdicts import summary

    total = summary(lines, seconds)
    out.write({"summary": total, **results.origin()})
    print(json.dumps(total))
    return 0 if total["named"] == total["faults"] else 1


class Lines:
    """A file that has every line as soon as it is known; or none."""

    def __init__(self, path: Path | None) -> None:
        self._file = None if path is None else path.open("w")

    def write(self, content: dict[str, Any]) -> None:
        if self._file is not None:
            print(json.dumps(content), file=self._file, flush=True)

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
