"""The picture of docs/scale.md, from result files: python benchmarks/plot_scale.py OUT.png

Left: ExDyna's step over the step without communication, as hosts are added. Middle: the arithmetic of a step
over a bare add_ and zero_, as the model grows. Right: step time as the density grows.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

RESULTS = Path(__file__).parent / "results"
DATE = "2026-11-15"


def load(name: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((RESULTS / f"{name}-{DATE}.json").read_text())
    return result


def row(result: dict[str, Any], **wanted: Any) -> dict[str, Any]:
    (found,) = (r for r in result["rows"] if all(r[key] == value for key, value in wanted.items()))
    return dict(found)


def draw(out: Path) -> None:
    figure, (hosts, size, density) = plt.subplots(1, 3, figsize=(13, 4.2), constrained_layout=True)
    runs = {world: load(f"step-mlp-1gbit-{world}-hosts") for world in (2, 4, 8)}
    runs[16] = load("step-mlp20-1gbit-16-hosts")  # 21 million parameters: 25 do not fit
    for sync, colour in (("dense", "tab:red"), ("exdyna", "tab:blue")):
        hosts.plot([*runs], [row(run, sync=sync)["vs_noop"] for run in runs.values()], "o-", color=colour)
        hosts.annotate(sync, (16, row(runs[16], sync=sync)["vs_noop"]), (-8, 8), textcoords="offset points")
    hosts.set(xscale="log", xlabel="hosts at 1 Gbit/s, all on two cores")
    hosts.set(ylabel="step over one without communication")
    hosts.set_xticks([*runs], [str(world) for world in runs])
    hosts.minorticks_off()
    hosts.axhline(1.0, color="black", linestyle="--", linewidth=2)
    hosts.set_ylim(0)

    sizes = {n: load(f"overhead-{n}") for n in ("1e6", "1e8", "3e8")}
    for exchange, colour in (("steps", "tab:blue"), ("gradients", "tab:orange")):
        for kernel, style in (("compiled", "o-"), ("torch", "o:")):
            ratios = [row(r, exchange=exchange, kernel=kernel)["ratio"] for r in sizes.values()]
            size.plot([float(n) for n in sizes], ratios, style, color=colour, label=f"{exchange}, {kernel}")
    size.set(xscale="log", xlabel="parameters", ylabel="arithmetic over add_ and zero_")
    size.set_ylim(0)
    size.legend(frameon=False)

    densities = {"0.001": load("step-mlp-1gbit-4-hosts")}
    densities |= {d: load(f"step-mlp-1gbit-density-{d}") for d in ("0.01", "0.1", "0.3")}
    for sync, colour in (("noop", "black"), ("dense", "tab:red"), ("exdyna", "tab:blue")):
        times = [row(run, sync=sync)["step_ms"] for run in densities.values()]
        density.plot([float(d) for d in densities], times, "--" if sync == "noop" else "o-", color=colour)
        density.annotate(sync, (0.3, times[-1]), (-14, 7), textcoords="offset points")
    density.set(xscale="log", xlabel="density asked for", ylabel="ms a step, 4 hosts at 1 Gbit/s")
    density.set_ylim(0)
    for axes in (hosts, size, density):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(out, dpi=120)


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
