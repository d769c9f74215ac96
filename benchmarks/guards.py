"""What the tag and the guards cost: steps of ExDyna with and without them, in turn, in one run.

    torchrun --nproc-per-node 4 benchmarks/guards.py --params 25e6 --rounds 12 --json FILE

Without: no words that ride along are compared, no model is shown, no parameter is looked at for who wrote it
or unfroze it. The words themselves travel in both: 16 bytes a unit. On a shared machine the ratio is known to
some per cent only; so the seconds spent in the guards are added up too, where they stand.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from gradsieve.replica.parameter_views import ParameterViews

from gradsieve import runner
from gradsieve.pipeline import base
from gradsieve_tools.bench.common.workloads import batch_for, build
from gradsieve_tools.bench.step.worker import Arena, Contestant

SYNCS = ("noop", "exdyna", "exdyna without guards")


def unchecked(*_: Any) -> Iterator[None]:
    yield from ()


def no_words(tag: Any, rank: int, idle: int, like: torch.Tensor) -> torch.Tensor:
    return like.new_zeros(base.WORDS)


GUARDS = [
    (base, "words", no_words),
    (base, "agree", unchecked),
    (ParameterViews, "show_own", mock.Mock(return_value=None)),
    (ParameterViews, "show_shared", mock.Mock(return_value=None)),
    (runner, "refuse_unfrozen", mock.Mock(return_value=None)),
]


@contextlib.contextmanager
def without_guards() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for owner, name, instead in GUARDS:
            stack.enter_context(mock.patch.object(owner, name, instead))
        yield


@contextlib.contextmanager
def clocked(spent: list[float]) -> Iterator[None]:
    """With the guards, and how long each call of one took. `agree` is a generator, run to its end here: it
    asks for nothing while ranks agree."""
    with contextlib.ExitStack() as stack:
        for owner, name, _ in GUARDS:
            stack.enter_context(mock.patch.object(owner, name, _timed(getattr(owner, name), spent)))
        yield


def _timed(guard: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    def timed(*args: Any, **settings: Any) -> Any:
        start = time.perf_counter()
        result = guard(*args, **settings)
        if isinstance(result, Generator):
            result = iter(list(result))
        spent.append(time.perf_counter() - start)
        return result

    return timed


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--params", type=float, default=25e6)
    parser.add_argument("--workload", default="mlp")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    arena = Arena(build(args.workload, int(args.params)), None)
    batch = batch_for(args.workload, int(args.params))
    spent: list[float] = []
    ranks = {name: Contestant(name.split()[0], arena, 0.001) for name in SYNCS}

    def turn(name: str, steps: int, measured: bool) -> None:
        around = without_guards() if "without" in name else clocked(spent if measured else [])
        with around:
            ranks[name].run(batch, steps, measured)

    for name in SYNCS:
        turn(name, 16, measured=False)
    for number in range(args.rounds):
        for name in SYNCS if number % 2 else reversed(SYNCS):
            turn(name, 5, measured=True)
    seconds = {name: ranks[name].seconds for name in SYNCS}
    ratios = [a / b for a, b in zip(seconds[SYNCS[1]], seconds[SYNCS[2]], strict=True)]
    quarter, half, three = statistics.quantiles(ratios, n=4)
    worked = {name: ranks[name].worked / ranks[name].steps for name in SYNCS}
    row = {
        "step_ms": {name: round(1e3 * statistics.median(each), 2) for name, each in seconds.items()},
        "cpu_ms": {name: round(1e3 * each, 2) for name, each in worked.items()},
        "guards_ms": round(1e3 * sum(spent) / ranks[SYNCS[1]].steps, 4),
        "guards_part_of_a_step": round(
            sum(spent) / ranks[SYNCS[1]].steps / statistics.median(seconds[SYNCS[1]]), 6
        ),
        "with_over_without": round(half, 4),
        "quartiles": [round(quarter, 4), round(three, 4)],
        "ranks": dist.get_world_size(),
        **{key: str(value) for key, value in vars(args).items()},
    }
    if dist.get_rank() == 0:
        print(json.dumps(row, indent=2))
        if args.json:
            args.json.write_text(json.dumps(row, indent=2) + "\n")
    dist.barrier()
    for contestant in ranks.values():
        contestant.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
