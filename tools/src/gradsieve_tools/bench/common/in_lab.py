"""A bench whose ranks are the hosts of a lab, both ends of it.

rows = rows_from_hosts("gradsieve_tools.bench.step.worker", config)   # the command: runs it on every host
run_rank(measure)                                               # the module: rows = measure(config)
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from gradsieve.errors import GradsieveError
from gradsieve_tools.bench.common.ranks import leave
from gradsieve_tools.emulation import Lab
from gradsieve_tools.emulation.topology import read

Rows = list[dict[str, Any]]


def lab_of(config: Mapping[str, Any]) -> Lab:
    """Return as many hosts and such links as `config` says, or the network in a file of its own."""
    if config.get("network"):
        return Lab(read(Path(config["network"])))
    return Lab(config["hosts"], config["rate"], config["delay"])


def rows_from_hosts(worker: str, config: dict[str, Any]) -> Rows:
    """Return what rank 0 of `worker` measured on the hosts of `lab_of(config)`."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        argument = json.dumps({**config, "out": str(out)})
        with lab_of(config) as lab:
            codes = lab.run([sys.executable, "-m", worker, argument])
        if not out.exists():
            raise GradsieveError(
                f"the ranks of the bench ended with exit codes {codes}; their output is above"
            )
        rows: Rows = json.loads(out.read_text())
    for host, code in enumerate(codes):
        if code != 0:
            warning = f"host {host} ended with exit code {code} as it left; the measurement was complete"
            print(f"gradsieve: warning: {warning}", file=sys.stderr)
    return rows


def run_rank(measure: Callable[[dict[str, Any]], Rows]) -> NoReturn:
    """The life of one rank: join the others, measure, and leave when all of them have."""
    config = json.loads(sys.argv[1])
    per_host = config.get("per_host", 1)
    if int(os.environ.get("LOCAL_WORLD_SIZE", 1)) != per_host:
        _become_ranks(per_host)
    out = Path(config.pop("out"))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows = measure(config)
    if dist.get_rank() == 0:
        part = out.with_suffix(".part")
        part.write_text(json.dumps(rows))
        part.rename(out)  # whole or not at all: where it is, all ranks have measured to the end
    leave()


def _become_ranks(count: int) -> NoReturn:
    """This command `count` times on this host, which it was started once on; ends as they do."""
    host, hosts = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    started = []
    for local in range(count):
        place = {"RANK": host * count + local, "WORLD_SIZE": hosts * count, "LOCAL_RANK": local}
        texts = {name: str(value) for name, value in (place | {"LOCAL_WORLD_SIZE": count}).items()}
        started.append(subprocess.Popen([sys.executable, *sys.orig_argv[1:]], env=os.environ | texts))
    codes = [one.wait() for one in started]
    sys.exit(next((code for code in codes if code != 0), 0))


def tell(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, file=sys.stderr, flush=True)


def bytes_out() -> int:
    """Bytes that left this host, from the interface's own counter."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "eth0":
            return int(counters.split()[8])
    return 0


def most_anywhere(value: float) -> float:
    """The largest value that a rank has."""
    tensor = torch.tensor([value], dtype=torch.float64, device="cpu")
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return float(tensor)


def same_everywhere(value: float) -> float:
    """Rank 0's."""
    tensor = torch.tensor([value], dtype=torch.float64, device="cpu")
    dist.broadcast(tensor, 0)
    return float(tensor)


def ratio(name: str, top: Sequence[float], bottom: Sequence[float]) -> dict[str, Any]:
    """Within each round: the median, and between which values the middle half of the rounds lies."""
    ratios = [over / under for over, under in zip(top, bottom, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive") if ratios[1:] else 3 * ratios
    return {
        name: round(middle, 3),
        f"{name}_half": [round(low, 3), round(high, 3)],
        f"{name}_all": [round(ratio, 3) for ratio in ratios],
    }
