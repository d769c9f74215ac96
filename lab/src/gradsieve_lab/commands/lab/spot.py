"""`gradsieve lab spot`: one training on nodes that are killed, given notice and replaced, under torchrun."""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradsieve.errors import ConfigError
from gradsieve.tools.cli import describe, progress, results

if TYPE_CHECKING:
    from gradsieve_lab.spot.campaign import Fault

_DESCRIPTION = """\
Two nodes, each an agent of torchrun with a worker in real processes of this machine, train by a script that
is called and speaks as examples/restarts.py does. Their workers are killed, whole nodes are killed or given
notice (SIGTERM to the agent) and replaced. In the end the model has to be, bit for bit, that of an
undisturbed run. Every checkpoint is read back when it appears, and its hashes are compared.

With --workers and --nodes one fault follows another as soon as the training has saved again. With --hours
they come by chance, whatever the nodes are doing, in time that runs --speed times as fast: every hour a
notice, every second hour a worker and a node without one, in the mean.
"""
_EXAMPLE = """\
examples:
  gradsieve lab spot examples/restarts.py --workers 20 --nodes 6 --json spot-kills.json
  gradsieve lab spot examples/restarts.py --hours 24 --speed 100 --json spot-day.json
"""
_COLUMNS = ["kind", "faults", "overtaken", "median_s", "longest_s", "lost_steps"]


def fill(parser: argparse.ArgumentParser) -> None:
    describe(parser, run, _DESCRIPTION, _EXAMPLE)
    add = parser.add_argument
    add("script", type=Path, help="the training")
    add("--workers", type=int, default=0, metavar="N", help="workers to kill (default: %(default)s)")
    add("--nodes", type=int, default=0, metavar="N", help="nodes to kill and replace (default: %(default)s)")
    add("--hours", type=float, default=0.0, metavar="H", help="instead, by chance for so long")
    add("--speed", type=float, default=100.0, metavar="X", help="of these hours (default: %(default)s)")
    add("--seed", type=int, default=1, metavar="N", help="of the schedule (default: %(default)s)")
    add("--json", type=Path, metavar="FILE", help="write the figures there")


def run(args: argparse.Namespace) -> int:
    from gradsieve_lab.spot.campaign import KINDS, Campaign, by_chance, one_by_one

    if bool(args.hours > 0) == bool(args.workers + args.nodes > 0):
        raise ConfigError("give --workers and --nodes, or --hours")
    results.writable(args.json)
    if args.hours > 0:
        faults = by_chance(args.seed, args.hours, args.speed)
    else:
        faults = one_by_one(args.seed, args.workers, args.nodes)
    with tempfile.TemporaryDirectory(prefix="gradsieve-spot-") as folder, progress(len(faults)) as advance:
        campaign = Campaign(args.script, Path(folder), faults, args.seed)
        for fault in campaign.run():
            back = "overtaken by the next" if fault.seconds is None else f"back after {fault.seconds:.1f} s"
            advance(1, f"{fault.kind}, {back}")
    verdict = campaign.verdict
    rows = [_row(kind, [fault for fault in faults if fault.kind == kind]) for kind in KINDS]
    print(results.table(rows, _COLUMNS))
    same = "the bits of" if verdict.digest == verdict.undisturbed else "other bits than"
    print(
        f"{verdict.steps} steps in {verdict.seconds:.0f} s, {len(faults)} faults, {verdict.checkpoints} "
        f"checkpoints read back, {len(verdict.damaged)} damaged, {len(verdict.jobs)} times torchrun itself "
        f"failed and all nodes were started again; ended with {same} an undisturbed run"
    )
    if args.json is not None:
        results.write(args.json, {"seed": args.seed, **verdict.as_json()}, rows)
    return 0 if verdict.is_good else 1


def _row(kind: str, faults: list[Fault]) -> dict[str, Any]:
    seconds = [fault.seconds for fault in faults if fault.seconds is not None]
    return {
        "kind": kind,
        "faults": len(faults),
        "overtaken": len(faults) - len(seconds),
        "median_s": round(statistics.median(seconds), 1) if seconds else None,
        "longest_s": round(max(seconds), 1) if seconds else None,
        "lost_steps": sum(fault.lost for fault in faults),
    }
