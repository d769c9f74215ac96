"""`gradsieve bench step`: the time of a whole training step, every sync in one run on a lab network.

`noop` (no communication) is the limit and `dense` what people run today; both are always among the syncs.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from gradsieve.bench.results import table, writable, write
from gradsieve.bench.workloads import WORKLOADS
from gradsieve.errors import ConfigError, GradsieveError
from gradsieve.lab import Lab
from gradsieve.schemes import SCHEMES
from gradsieve.types import check_density

_HOOKS = ("fp16", "powersgd")
"""torch's own communication hooks, for comparison."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hosts", type=int, default=4, metavar="N", help="hosts in the lab (default: 4)")
    parser.add_argument("--rate", metavar="R", help="of each link, e.g. 1gbit (default: unshaped)")
    parser.add_argument("--delay", metavar="D", help="one way, e.g. 5ms (default: none)")
    parser.add_argument("--workload", choices=WORKLOADS, default="mlp", help="what is trained (default: mlp)")
    parser.add_argument("--params", type=float, default=25e6, metavar="N", help="model size (default: 25e6)")
    parser.add_argument("--density", type=float, default=0.001, metavar="D", help="default: 0.001")
    parser.add_argument(
        "--syncs",
        default="noop,dense,fp16,powersgd,topk,exdyna",
        metavar="LIST",
        help=f"from {', '.join([*SCHEMES, *_HOOKS])} (default: %(default)s)",
    )
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="turns for each sync (default: 5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")


def run(args: argparse.Namespace) -> int:
    config = {
        "hosts": args.hosts,
        "rate": args.rate,
        "delay": args.delay,
        "workload": args.workload,
        "params": int(args.params),
        "density": args.density,
        "syncs": _syncs(args.syncs),
        "rounds": args.rounds,
    }
    check_density(args.density)
    writable(args.json)
    rows = _in_the_lab(config)
    columns = ["sync", "step_ms", "vs_noop", "vs_dense", "bytes_sent", "density"]
    print(table(rows, columns))
    if args.json is not None:
        write(args.json, config, rows)
    return 0


def _syncs(names: str) -> list[str]:
    wanted = list(dict.fromkeys(["noop", "dense", *filter(None, names.split(","))]))
    unknown = [name for name in wanted if name not in SCHEMES and name not in _HOOKS]
    if unknown:
        raise ConfigError(
            f"no sync is called {', '.join(unknown)}; there are: {', '.join([*SCHEMES, *_HOOKS])}"
        )
    return wanted


def _in_the_lab(config: dict[str, Any]) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        argument = json.dumps({**config, "out": str(out)})
        with Lab(config["hosts"], config["rate"], config["delay"]) as lab:
            codes = lab.run([sys.executable, "-m", "gradsieve.bench.step_worker", argument])
        if any(codes):
            raise GradsieveError(
                f"the ranks of the bench ended with exit codes {codes}; their output is above"
            )
        rows: list[dict[str, Any]] = json.loads(out.read_text())
    return rows
