"""`gradsieve doctor`: is this cluster set up well?"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from gradsieve.errors import ConfigError
from gradsieve_tools.cli.arguments import describe, drawable
from gradsieve_tools.cli.progress_bar import progress
from gradsieve_tools.profiles import write_profile
from gradsieve_tools.results import writable

if TYPE_CHECKING:
    from gradsieve_tools.doctor.meeting import Board

_FILE = "gradsieve-self-test.json"
_DESCRIPTION = """\
Examine the group that torchrun or a lab starts: run it where training would run, one process a rank.

It shows which interface gloo really uses on every rank, measures latency and bandwidth of every pair of ranks
(in rounds, each rank with one partner at a time) and the speed of every host, and looks at threads, versions,
kernels and time-outs. Each finding has a severity and the command that fixes it. Rank 0 prints.

It takes some seconds, 15 s at most for each pair that does not answer, and sends at most 200 MB a rank and
round, with at most 64 rounds.

With --self-test, not the cluster but this device: two ranks of its own compare kernels with the reference and
a training with the CPU's, look for leaks, and kill one of them. It takes a minute or two.
"""
_EXAMPLES = """\
examples:
  torchrun --nnodes 4 --rdzv-backend c10d --rdzv-endpoint HOST:29400 --no-python gradsieve doctor
  gradsieve lab run --network examples/networks/slow-link.toml -- gradsieve doctor --heat-map pairs.png
  gradsieve lab run --hosts 4 --rate 1gbit -- gradsieve doctor --profile lab.toml --model train:build
  gradsieve doctor --self-test --device cuda

The exit code is 0 if all is well (there may be notes), 1 if there is an error or a warning or a check failed,
2 if it could not be found out.
"""


def fill(parser: argparse.ArgumentParser) -> None:
    describe(parser, run, _DESCRIPTION, _EXAMPLES)
    add = parser.add_argument
    add("--heat-map", type=Path, metavar="FILE", help="draw bandwidth and latency of all pairs, PNG or SVG")
    add("--profile", type=Path, metavar="FILE", help="write what was measured there: TOML, to predict from")
    add(
        "--model",
        metavar="MODULE:FACTORY",
        help="a function that returns your model, or it and a function that takes it and returns a loss: "
        "counts parameters and units, measures forward and backward, looks for hooks in the way",
    )
    add(
        "--timeout",
        type=float,
        metavar="SECONDS",
        help="that your training gives to init_process_group (default: torch's 1800)",
    )
    add(
        "--json",
        type=Path,
        metavar="FILE",
        help=f"write facts, figures and findings there (of a self-test, by default to {_FILE})",
    )
    add("--self-test", action="store_true", help="does gradsieve work on this device? Without torchrun")
    add("--device", help="of the self-test: cpu, cuda, ... (default: the accelerator that is there, or cpu)")


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
