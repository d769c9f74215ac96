"""How far the plan's model is from the runs whose figures are in it.

    python benchmarks/plan_on_results.py F

No validation: constants of the model come from some of these files. Links and compute are those of each run
(its rate less the 4.3 % that headers take, its own step without communication). The host is one for all: the
14 GB/s and 0.76 G/s that this machine has for one rank alone, half of it with four ranks on two cores.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median

from gradsieve.comm.links import Links
from gradsieve_tools import results
from gradsieve_tools.costs import Costs, Host, with_rings
from gradsieve_tools.emulation.units import parse_rate
from gradsieve_tools.plan.options import Model, named
from gradsieve_tools.plan.predict import predict

FOLDER = Path(__file__).parent / "results"
FILES = ["step-mlp", "step-transformer"]
RATES = ["100mbit", "1gbit", "unshaped"]
GOODPUT, LATENCY, UNSHAPED = 0.957, 1e-3, 30e9


def main() -> None:
    rows = [row for name in FILES for rate in RATES for row in _of(FOLDER / f"{name}-{rate}-2026-11-15.json")]
    print(results.table(rows, ["file", "sync", "measured_ms", "predicted_ms", "off"]))
    off = sorted(abs(row["off"]) for row in rows)
    print(f"\n{len(rows)} steps: off by {median(off):.1%} in the median, {off[-1]:.1%} at most")
    if len(sys.argv) > 1:
        results.write(Path(sys.argv[1]), {"median": median(off), "most": off[-1]}, rows)


def _of(path: Path) -> list[dict[str, object]]:
    run = json.loads(path.read_text())
    config, measured = run["config"], {row["sync"]: row["step_ms"] for row in run["rows"]}
    compute, world = measured["noop"] / 1e3, config["hosts"]
    shared = max(1, world / 2)
    rate = (parse_rate(config["rate"]) or UNSHAPED / GOODPUT) * GOODPUT
    host = Host(14e9 / shared, 0.76e9 / shared, 50e-6)
    costs = Costs(world, with_rings(Links(LATENCY, 32 / rate), world), host)
    model = Model(config["params"], compute / 3, 2 * compute / 3)
    rows: list[dict[str, object]] = []
    for sync, step in measured.items():
        option = named(sync, model, costs, config["density"])
        predicted = 1e3 * predict(option, model, costs).step
        row = {"file": path.stem, "sync": sync, "measured_ms": step, "predicted_ms": predicted}
        if sync != "noop":
            rows.append(row | {"off": predicted / step - 1})
    return rows


if __name__ == "__main__":
    main()
