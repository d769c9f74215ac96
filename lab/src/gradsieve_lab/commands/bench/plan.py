"""`gradsieve bench plan`: predictions held against a lab, or against what others measured on GPUs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from gradsieve.errors import ConfigError
from gradsieve.tools.cli import describe, progress, size

_DESCRIPTION = """\
How far the predictions of `gradsieve plan` are from what a lab measures.

For each case of hosts, rate and delay: a profile by `gradsieve doctor`, every sync's exchange alone, and a
whole training step with it. A case takes some minutes, and is a file in the folder: a run that was broken off
goes on with those that are not there. Needs root.

With --against it runs nothing: steps of DDP and LocalSGD that others measured on GPUs are predicted as
`gradsieve plan --device` does.

columns:
  exchange_ms     one exchange alone, its own computing included; predicted_exchange_ms, and how far off
  step_ms         a whole training step; predicted_ms, and how far off
"""
_EXAMPLES = """\
examples:
  gradsieve bench plan --cases 4:1gbit:0ms,4:100mbit:5ms --folder runs --json plan-lab.json
  gradsieve bench plan --folder runs --json plan-lab.json      # 36 cases
  gradsieve bench plan --against benchmarks/results/gpu-cluster-2026-08-16.json
"""


def fill(parser: argparse.ArgumentParser) -> None:
    describe(parser, run, _DESCRIPTION, _EXAMPLES)
    add = parser.add_argument
    add(
        "--cases",
        default="grid",
        metavar="LIST",
        help="hosts:rate:delay, or a network's TOML file, with commas between (default: 2 to 16 hosts, "
        "20mbit to 1gbit, 0 to 20ms)",
    )
    add("--params", type=size, default="2e6", metavar="N", help="of an MLP (default: %(default)s)")
    add("--density", type=float, default=0.01, metavar="D", help="share that is sent (default: 0.01)")
    add("--syncs", metavar="LIST", help="default: dense, fp16, powersgd, auto and the flat schemes")
    add("--rounds", type=size, default="3", metavar="N", help="turns for each sync (default: 3)")
    add("--folder", type=Path, metavar="FOLDER", help="where each case's result is kept")
    add("--against", type=Path, metavar="FILE", help="steps that others measured on GPUs, instead of a lab")
    add("--json", type=Path, metavar="FILE", help="write all of them there, with the errors")


def run(args: argparse.Namespace) -> int:
    from gradsieve.tools.cli import results
    from gradsieve_lab.bench.common.syncs import SYNCS as KNOWN
    from gradsieve_lab.plan_validation import measure as validate

    if (args.folder is None) == (args.against is None):
        raise ConfigError("give --folder for a lab, or --against for what others measured")
    if args.against is not None:
        return _against(args.against, args.json)
    syncs = args.syncs.split(",") if args.syncs else validate.SYNCS
    unknown = [sync for sync in syncs if sync not in KNOWN]
    if unknown:
        raise ConfigError(f"no sync is called {', '.join(unknown)}; there are: {', '.join(KNOWN)}")
    results.writable(args.json)
    args.folder.mkdir(parents=True, exist_ok=True)
    cases = [
        validate.Case(place, args.params, args.density, syncs, args.rounds)
        for place in validate.places(args.cases)
    ]
    with progress(len(cases)) as advance:
        rows, failed = validate.run_all(cases, args.folder, lambda doing: advance(1, doing))
    if rows:
        print(results.table(rows, validate.COLUMNS))
        print(results.table([validate.summary(rows)], list(validate.summary(rows))))
    for line in failed:
        print(f"gradsieve: {line}", file=sys.stderr)
    if args.json is not None and rows:
        config = {"params": args.params, "density": args.density, "syncs": syncs, "failed": failed}
        results.write(args.json, config | validate.summary(rows), rows)
    return 1 if failed else 0


def _against(path: Path, json: Path | None) -> int:
    from gradsieve.tools.cli import results
    from gradsieve_lab.plan_validation import against

    results.writable(json)
    cluster = against.Cluster.read(path)
    rows = against.compare(cluster)
    found = against.summary(rows)
    print(results.table(rows, against.COLUMNS))
    print(results.table([found], list(found)))
    if json is not None:
        results.write(json, {"source": cluster.source, **found}, rows)
    return 0
