"""One rank of `gradsieve bench collectives`: every collective in three ways, round robin, size by size."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradsieve.comm import rounds
from gradsieve.comm.engine import Engine
from gradsieve.schemes import AllGather, AllReduce, AllToAll, Ctx, Op, Program
from gradsieve_tools.bench.common.in_lab import Rows, run_rank, tell
from gradsieve_tools.bench.exchange import bare, turn
from gradsieve_tools.link_costs import measure_all

COLUMNS = ["hosts", "op", "bytes", "bare_ms", "engine_ms", "rounds_ms", "direct_ms", "chosen", "faster"]

_CPU = torch.device("cpu")
Way = Callable[[], object]


def measure(config: dict[str, Any]) -> Rows:
    engine, plain = Engine(), dist.new_group()
    rank, world = engine.rank, engine.world
    links = engine.run(measure_all(Ctx(rank, world, 0), _CPU), "the links", _CPU)
    tell(f"a round takes {1e6 * links.latency:.0f} us and {1e9 * links.word:.1f} ns a word; gloo's shortest "
         f"all-gather {1e3 * links.gather:.2f} ms, all-reduce {1e3 * links.sum:.2f} ms")  # fmt: skip
    rows: Rows = []
    for size in config["sizes"]:
        for op in _ops(size, world):
            ways: dict[str, Way] = {
                "bare": bare(op, plain),
                "engine": partial(_run, engine, _asked, op),
                "rounds": partial(_run, engine, rounds.in_rounds, op),
            }
            if not isinstance(op, AllToAll):
                ways["direct"] = partial(_run, engine, rounds.directly, op)
            seconds = _round_robin(ways, config["rounds"])
            route = rounds.route(op, world, links)
            rows.append(_row(op, seconds, "engine" if route == "backend" else route))
            tell(f"{rows[-1]['op']} of {rows[-1]['bytes']:,} bytes: {rows[-1]['faster']} times as fast")
    engine.close()
    return rows


def _ops(size: int, world: int) -> list[Op]:
    words = -(-size // 4)
    rows = torch.zeros(world, -(-words // world), dtype=torch.float32, device="cpu")
    return [
        AllGather(_zeros(words)),
        AllReduce(_zeros(words)),
        AllToAll(rows, (1,) * world, (1,) * world, even=True),
    ]


def _zeros(words: int) -> Tensor:
    return torch.zeros(words, dtype=torch.float32, device="cpu")


def _asked(op: Op, rank: int, world: int) -> Program[Tensor]:
    return (yield op)


def _run(engine: Engine, carry: Callable[[Op, int, int], Program[Tensor]], op: Op) -> Tensor:
    return engine.run(carry(op, engine.rank, engine.world), "bench collectives", _CPU)


def _round_robin(ways: dict[str, Way], turns: int) -> dict[str, list[float]]:
    """Interleaved, after one turn each that is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(turns + 1):
        for name, way in ways.items():
            taken = turn(way).seconds
            if number:
                seconds[name].append(taken)
    return seconds


def _row(op: Op, seconds: dict[str, list[float]], chosen: str) -> dict[str, Any]:
    medians = {f"{name}_ms": round(1e3 * statistics.median(each), 3) for name, each in seconds.items()}
    ratios = [bare / ours for bare, ours in zip(seconds["bare"], seconds[chosen], strict=True)]
    return {
        "op": type(op).__name__,
        "bytes": op.tensor.numel() * op.tensor.element_size(),
        "direct_ms": None,
        **medians,
        "chosen": chosen,
        "faster": round(statistics.median(ratios), 2),
        "ms_all": {name: [round(1e3 * one, 3) for one in each] for name, each in seconds.items()},
    }


if __name__ == "__main__":
    run_rank(measure)
