"""`gradsieve doctor`: is this cluster set up well?"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from gradsieve.errors import ConfigError
from gradsieve_tools.cli.arguments import drawable
from gradsieve_tools.cli.progress_bar import progress
from gradsieve_tools.profiles import write_profile
from gradsieve_tools.results import writable

if TYPE_CHECKING:
    from gradsieve_tools.doctor.meeting import Board

_FILE = "gradsieve-self-test.json"


def run(args: argparse.Namespace) -> int:
    if args.self_test:
        return _self_test(args)
    if args.device is not None:
        raise ConfigError("--device is for --self-test: ranks take the accelerator that they have")
    if args.timeout is not None and not args.timeout > 0:
        raise ConfigError("--timeout is more than 0 s")
    from gradsieve_tools.doctor.meeting import Board
    from gradsieve_tools.doctor.run import examine, leave

    meeting = Board.join()
    if meeting.rank == 0:
        return _lead(meeting, args)
    examine(meeting, args.model, args.timeout, lambda _: None)
    leave(meeting)
    return 0


def _self_test(args: argparse.Namespace) -> int:
    if any(each is not None for each in (args.heat_map, args.profile, args.model, args.timeout)):
        raise ConfigError("--self-test goes with --device and --json alone: it looks at no cluster")
    from gradsieve_tools.doctor.self_test import view
    from gradsieve_tools.doctor.self_test.findings import exit_code
    from gradsieve_tools.doctor.self_test.run import CHECKS, examine

    path = args.json or Path(_FILE)
    writable(path)
    with progress(len(CHECKS)) as advance:
        report = examine(args.device or "", lambda doing: advance(1, doing))
    view.write_json(path, report)
    print(f"{view.text(report)}; {path} has all figures, for an issue")
    return exit_code(report.findings)


def _lead(meeting: Board, args: argparse.Namespace) -> int:
    """Rank 0 has the others' figures, and the exit code."""
    from gradsieve_tools.doctor import view
    from gradsieve_tools.doctor.findings import exit_code
    from gradsieve_tools.doctor.pairs import rounds
    from gradsieve_tools.doctor.run import examine, leave

    for path in (args.heat_map, args.profile, args.json):
        writable(path)
    drawable(args.heat_map)
    if args.profile is not None and meeting.world < 2:
        raise ConfigError("a profile is of a network: start two ranks at least, by torchrun or in a lab")
    with progress(len(rounds(meeting.world)) + 4) as advance:
        report = examine(meeting, args.model, args.timeout, lambda doing: advance(1, doing))
    leave(meeting)
    assert report is not None
    print(view.text(report))
    if args.json is not None:
        view.write_json(args.json, report)
    if args.heat_map is not None and report.answers:
        view.draw(report, args.heat_map)
    if args.profile is not None and report.answers:
        write_profile(args.profile, view.profile_of(report))
    return exit_code(report.findings)
