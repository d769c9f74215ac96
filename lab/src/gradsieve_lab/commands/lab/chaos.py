"""`gradsieve lab chaos`: a training through faults of every kind, from a seed; all of them checked."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradsieve.errors import ConfigError
from gradsieve.tools.cli import describe, progress, results
from gradsieve_lab.commands.lab.kill_matrix import Lines

if TYPE_CHECKING:
    from gradsieve_lab.chaos.campaign import Campaign
    from gradsieve_lab.chaos.verdicts import Line

_DESCRIPTION = """\
Three real ranks train with stripes, ExDyna, Ok-Topk and SparDL while a schedule of faults, made from the
seed, happens to them: deaths, also in the middle of a file; stops, damaged payloads, broken and slow links,
disks and processors, a store that goes and comes back, clocks that jump, notices of an end. After a fault
that ends the ranks all restart from the last checkpoint. Every rank's exit code, error, time and digests are
checked against an undisturbed run, every checkpoint that was acknowledged is read back, and what was lost
since is counted.

One line of JSON a fault, the last line sums them up. The exit code is 1 if anything hung, was lost silently
or went otherwise than it must. Links, disk and processor need root; without it their kinds are left out.
"""
_EXAMPLE = "example:\n  gradsieve lab chaos --faults 200 --seed 1 --json chaos.json\n"
_COLUMNS = ["kind", "faults", "named", "harmless", "recovered", "wrong", "silent", "hung"]
_COLUMNS += ["lost_steps", "lost_mass", "p50_ms", "p99_ms"]


def fill(parser: argparse.ArgumentParser) -> None:
    describe(parser, run, _DESCRIPTION, _EXAMPLE)
    add = parser.add_argument
    add("--faults", type=int, default=200, metavar="N", help="how many (default: %(default)s)")
    add("--seed", type=int, default=1, metavar="N", help="of the schedule (default: %(default)s)")
    add("--kinds", metavar="LIST", help="only the schedule's faults of these kinds, to repeat what was found")
    add("--json", type=Path, metavar="FILE", help="write the lines there")


def run(args: argparse.Namespace) -> int:
    from gradsieve_lab.chaos.campaign import Campaign, missing
    from gradsieve_lab.chaos.kinds import KINDS
    from gradsieve_lab.chaos.schedule import schedule

    if args.faults < 1:
        raise ConfigError(f"--faults is {args.faults}; it has to be 1 or more")
    results.writable(args.json)
    absent = missing()
    for kind, needs in absent.items():
        print(f"left out: {kind}, which needs {needs}", file=sys.stderr)
    chances = schedule(args.seed, args.faults, [kind for kind in KINDS if kind not in absent])
    if args.kinds is not None:
        wanted = args.kinds.split(",")
        if unknown := [kind for kind in wanted if kind not in KINDS]:
            raise ConfigError(f"there is no kind {', '.join(unknown)}; there are: {', '.join(KINDS)}")
        chances = [chance for chance in chances if chance.kind in wanted]
    lines, start = list[Any](), time.monotonic()
    with Lines(args.json) as out:
        with Campaign(args.seed, chances) as campaign, progress(len(chances)) as advance:
            for line in campaign.run():
                lines.append(line)
                out.write(line.as_json())
                advance(1, f"{line.scheme}, {line.kind} of rank {line.rank}")
                if not line.is_good:
                    _say_wrong(line)
        return _end(out, lines, campaign, sorted(absent), time.monotonic() - start)


def _say_wrong(line: Line) -> None:
    print(f"wrong: fault {line.number}, {line.scheme}, {line.kind}: {line.outcome}", file=sys.stderr)
    replay = f"gradsieve lab chaos --faults {line.number + 1} --seed {line.seed}"
    print(f"again: {replay}  (its last fault)", file=sys.stderr)


def _end(out: Lines, lines: list[Line], campaign: Campaign, absent: list[str], seconds: float) -> int:
    from gradsieve_lab.chaos.verdicts import summary

    total = summary(lines, campaign.recovered, seconds) | {"left_out": absent}
    total["left_behind"] = campaign.remains()
    out.write({"summary": total, **results.origin()})
    rows = [
        {
            "kind": kind,
            **each,
            "p50_ms": each["detection_ms"].get("p50"),
            "p99_ms": each["detection_ms"].get("p99"),
        }
        for kind, each in total["kinds"].items()
    ]
    print(results.table(rows, _COLUMNS))
    print(
        f"{len(lines)} faults in {seconds:.0f} s: {total['named']} named, {total['harmless']} harmless, "
        f"{total['recovered']} recovered from, {total['wrong']} wrong, {total['hung']} hung, "
        f"{total['silent']} silent losses; {total['read_back']} acknowledged checkpoints read back; "
        f"deaths known after {total['deaths_ms']} ms; left behind: "
        f"{', '.join(total['left_behind']) or 'nothing'}"
    )
    is_good = total["wrong"] == 0 and not total["left_behind"] and total["recovered"] == total["named"]
    return 0 if is_good else 1
