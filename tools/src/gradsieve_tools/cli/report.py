"""`gradsieve report`: recordings as one HTML page."""

from __future__ import annotations

import argparse
from pathlib import Path

from gradsieve.errors import ConfigError
from gradsieve_tools.cli.arguments import describe

_DESCRIPTION = """\
Make one HTML page of recordings, that any browser opens without a network.

Takes what `gradsieve.record` and --record of the benches wrote: a folder, or files. Files of the same name
but for the rank are one training's; earlier files of a long one (.jsonl.1, ...) are found by themselves.
Lives of a training that was started again are joined. Lines that were not finished, of a job that runs or was
killed, are left out; a file that is no record is refused.

charts, over steps:
  bits a step      moved by a rank, a parameter
  link use         Mbit/s of a rank, over the whole step and while in collectives
  time by stage    ms a step, stacked; next to the whole training step
  age              steps for which what is sent now was in the residual
  imbalance f(t)   longest selection over the mean; 1 is balanced
  density          share of the elements that is sent, next to the target; and the threshold
  who waits        ms each rank spent in collectives beyond the rank that came last
and what to change, by rules, each with the figure it saw.
"""
_EXAMPLES = """\
examples:
  gradsieve report rec -o report.html
  gradsieve report rec/exdyna.rank*.jsonl -o exdyna.html
"""


def fill(parser: argparse.ArgumentParser) -> None:
    describe(parser, run, _DESCRIPTION, _EXAMPLES)
    parser.add_argument(
        "places", nargs="+", type=Path, metavar="FOLDER", help="a folder of records, or files"
    )
    parser.add_argument(
        "-o",
        "--out",
        type=Path,
        default=Path("report.html"),
        metavar="FILE.html",
        help="default: %(default)s",
    )
    parser.add_argument("--title", metavar="TEXT", help="of the page (default: the folder's name)")


def run(args: argparse.Namespace) -> int:
    from gradsieve_tools.report.gathered import files_of, gather
    from gradsieve_tools.report.report import report
    from gradsieve_tools.results import writable

    files = files_of(args.places)
    if args.out.resolve() in {file.resolve() for file in files}:
        raise ConfigError(f"{args.out} is one of the records")
    writable(args.out)
    page = report(gather(files), args.title or args.places[0].resolve().name)
    try:
        args.out.write_text(page, encoding="utf-8", errors="xmlcharrefreplace")
    except OSError as error:
        raise ConfigError(f"{args.out} cannot be written: {error}") from error
    print(f"{args.out}: {len(page.encode(errors='replace')) / 1e3:.0f} kB")
    return 0
