"""Calls of `gradsieve lab`: from what was typed to tables, files and an exit code."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradsieve.errors import ConfigError, GradsieveError
from gradsieve_tools.cli import drawable, progress, results

if TYPE_CHECKING:
    from gradsieve_tools.chaos.schedule import Chance
    from gradsieve_tools.chaos.verdicts import Line
    from gradsieve_tools.emulation.topology import Topology
    from gradsieve_tools.spot.campaign import Fault

_CHAOS = ["kind", "faults", "named", "harmless", "recovered", "wrong", "silent", "hung"]
_CHAOS += ["lost_steps", "lost_mass", "p50_ms", "p99_ms"]
_SPOT = ["kind", "faults", "overtaken", "median_s", "longest_s", "lost_steps"]
_SOAK = ["scheme", "rank", "measure", "first", "last", "slope", "allowed", "verdict"]


def run(args: argparse.Namespace) -> int:
    from gradsieve_tools.emulation import Lab

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
    from gradsieve_tools.emulation.topology import read

    if args.network is None:
        hosts: int = 4 if args.hosts is None else args.hosts
        return hosts
    if any(given is not None for given in (args.hosts, args.rate, args.delay)):
        raise ConfigError("a network file has hosts, rates and delays: leave --hosts, --rate and --delay out")
    return read(args.network)


def draw(args: argparse.Namespace) -> int:
    from gradsieve_tools.emulation import topology

    network = topology.read(args.network)
    out = args.out or args.network.with_suffix(".png")
    drawable(out)
    results.writable(out)
    from gradsieve_tools.emulation.draw import draw

    draw(network, out, args.network.stem)
    print(out)
    return 0


def kill_matrix(args: argparse.Namespace) -> int:
    from gradsieve_tools.chaos.campaign import Campaign
    from gradsieve_tools.chaos.schedule import matrix

    with Campaign(1, matrix(dict.fromkeys(args.schemes, 1))) as probe:
        ops = {scheme: probe.ops_of_a_step(scheme) for scheme in args.schemes}
    return _campaign(1, matrix(ops), args.json, [], "gradsieve lab kill-matrix --schemes {line.scheme}")


def fuzz(args: argparse.Namespace) -> int:
    from gradsieve_tools.fuzz import run

    if args.case is not None:
        return _repeat(args.target, args.seed, args.case)
    if args.guided:
        from gradsieve_tools.fuzz.guided import guide

        return guide(args.target, args.count, args.seed)
    with progress(args.count) as advance:
        report = run.fuzz(args.target, args.count, args.seed, advance)
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
    from gradsieve_tools.fuzz.entry_points.entry_point import REFUSED
    from gradsieve_tools.fuzz.targets import Cases

    _, entry, frame = Cases(target, seed).case(number)
    print(f"{entry.name}: {bytes(frame).hex()}")
    try:
        entry.enter(frame)
    except REFUSED as error:
        print(f"refused: {type(error).__name__}: {error}")
    else:
        print("read")
    return 0


def chaos(args: argparse.Namespace) -> int:
    from gradsieve_tools.chaos.campaign import missing
    from gradsieve_tools.chaos.kinds import KINDS
    from gradsieve_tools.chaos.schedule import schedule

    if args.faults < 1:
        raise ConfigError(f"--faults is {args.faults}; it has to be 1 or more")
    absent = missing()
    for kind, needs in absent.items():
        print(f"left out: {kind}, which needs {needs}", file=sys.stderr)
    chances = schedule(args.seed, args.faults, [kind for kind in KINDS if kind not in absent])
    if args.kinds is not None:
        wanted = args.kinds.split(",")
        if unknown := [kind for kind in wanted if kind not in KINDS]:
            raise ConfigError(f"there is no kind {', '.join(unknown)}; there are: {', '.join(KINDS)}")
        chances = [chance for chance in chances if chance.kind in wanted]
    again = f"gradsieve lab chaos --faults {{line.number}}+1 --seed {args.seed}  (its last fault)"
    return _campaign(args.seed, chances, args.json, sorted(absent), again)


def _campaign(seed: int, chances: Sequence[Chance], path: Path | None, absent: list[str], again: str) -> int:
    """Write a line as soon as it is known, and their summary; `again` repeats a fault."""
    from gradsieve_tools.chaos.campaign import Campaign
    from gradsieve_tools.chaos.verdicts import summary

    lines, start = list["Line"](), time.monotonic()
    with nullcontext() if path is None else path.open("w") as out:
        with Campaign(seed, chances) as campaign, progress(len(chances)) as advance:
            for line in campaign.run():
                lines.append(line)
                if out is not None:
                    print(json.dumps(line.as_json()), file=out, flush=True)
                advance(1, f"{line.scheme}, {line.kind} of rank {line.rank}")
                if not line.is_good:
                    print(f"wrong: {line.scheme}, {line.kind}: {line.outcome}", file=sys.stderr)
                    print(f"again: {again.format(line=line)}", file=sys.stderr)
        seconds = time.monotonic() - start
        total = summary(lines, campaign.recovered, seconds) | {"left_out": absent}
        total["left_behind"] = campaign.remains()
        if out is not None:
            print(json.dumps({"summary": total, **results.origin()}), file=out)
    rows = [
        {"kind": kind, **each} | {f"{name}_ms": each["detection_ms"].get(name) for name in ("p50", "p99")}
        for kind, each in total["kinds"].items()
    ]
    print(results.table(rows, _CHAOS))
    print(
        f"{len(lines)} faults in {seconds:.0f} s: {total['named']} named, {total['harmless']} harmless, "
        f"{total['recovered']} recovered from, {total['wrong']} wrong, {total['hung']} hung, "
        f"{total['silent']} silent losses; {total['read_back']} acknowledged checkpoints read back; "
        f"deaths known after {total['deaths_ms']} ms; left behind: "
        f"{', '.join(total['left_behind']) or 'nothing'}"
    )
    is_good = total["wrong"] == 0 and not total["left_behind"] and total["recovered"] == total["named"]
    return 0 if is_good else 1


def spot(args: argparse.Namespace) -> int:
    from gradsieve_tools.spot.campaign import KINDS, Campaign, by_chance, one_by_one

    if bool(args.hours > 0) == bool(args.workers + args.nodes > 0):
        raise ConfigError("give --workers and --nodes, or --hours")
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
    print(results.table(rows, _SPOT))
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


def soak(args: argparse.Namespace) -> int:
    from gradsieve_tools.soak.rank import SETTINGS
    from gradsieve_tools.soak.run import soaked

    schemes = list(dict.fromkeys(args.schemes))
    if unknown := [scheme for scheme in schemes if scheme not in SETTINGS]:
        raise ConfigError(f"no soak is known for {', '.join(unknown)}; there are: {', '.join(SETTINGS)}")
    rows, looks, start = list[Any](), dict[str, Any](), time.monotonic()
    for scheme in schemes:
        lines, seen = soaked(scheme, args.steps)
        rows += lines
        looks[scheme] = [[astuple(look) for look in each] for each in seen]
    seconds = time.monotonic() - start
    print(results.table([row.as_json() for row in rows], _SOAK))
    print(f"{args.steps:,} steps of each of {', '.join(schemes)} in {seconds:.0f} s; slopes a 1,000 steps")
    if args.json is not None:
        config = {"steps": args.steps, "schemes": schemes, "seconds": round(seconds, 1), "looks": looks}
        results.write(args.json, config, [row.as_json() for row in rows])
    return 0 if all(row.is_good for row in rows) else 1
