"""`gradsieve bench step`: the time of a whole training step, every sync in one run on a lab network.

`noop` (no communication) is the limit and `dense` what people run today; both are always among the syncs.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from gradsieve.bench.in_lab import rows_from_hosts
from gradsieve.bench.results import table, writable, write
from gradsieve.bench.rivals import SYNCS, syncs_of
from gradsieve.bench.workloads import WORKLOADS
from gradsieve.types import check_density


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
        help=f"from {', '.join(SYNCS)} (default: %(default)s)",
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
        "syncs": syncs_of(args.syncs, always=["noop", "dense"]),
        "rounds": args.rounds,
    }
    check_density(args.density)
    writable(args.json)
    rows = rows_from_hosts("gradsieve.bench.step_worker", config)
    columns = ["sync", "step_ms", "vs_noop", "vs_dense", "bytes_sent", "density"]
    print(table(rows, columns))
    if args.json is not None:
        write(args.json, config, rows)
    return 0
