"""`gradsieve report`: recordings as one HTML page."""

from __future__ import annotations

import argparse

from gradsieve.errors import ConfigError


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
