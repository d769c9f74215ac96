"""One rank of `gradsieve bench exchange`.

A few real steps show which collectives the scheme asks for, and of what size. Then these alone, with tensors
that lie ready, round robin:

    bare gloo   torch.distributed on a plain group, called from the main thread
    engine      a program that asks for them, submitted to our engine

The steps are a row as well: what they spend in collectives, waiting for slower ranks included.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from gradsieve import torch_names
from gradsieve.comm import ops as collectives
from gradsieve.comm.engine import Engine
from gradsieve.errors import ConfigError
from gradsieve.schemes import AllGather, AllReduce, AllToAll, Op, Program, Result, by_way_of
from gradsieve.testing import make_pipeline
from gradsieve_tools.bench.common.in_lab import bytes_out, most_anywhere, run_rank, tell
from gradsieve_tools.bench.common.syncs import treated
from gradsieve_tools.bench.common.workloads import build

COLUMNS = ["hosts", "what", "ms", "ratio", "bytes_sent"]

_WARM, _STEPS = 10, 5  # steps until the threshold is found, and timed steps
_REPEATED = 10  # exchanges in a turn
_CPU = torch.device("cpu")


class Turn(NamedTuple):
    seconds: float
    bytes_sent: float


def measure(config: dict[str, Any]) -> list[dict[str, Any]]:
    engine = Engine()
    ops, in_steps = _real_steps(engine, config)
    tell(f"a step asks for {', '.join(map(collectives.describe, ops))}")
    plain = dist.new_group()
    calls = [bare(op, plain) for op in ops]
    ways: dict[str, Callable[[], object]] = {
        "bare gloo": lambda: [call() for call in calls],
        "engine": lambda: engine.submit(ask(ops), "bench exchange", _CPU).result(),
    }
    for way in ways.values():
        turn(way)
    turns: dict[str, list[Turn]] = {name: [] for name in ways}
    for _ in range(config["rounds"]):
        for name, way in ways.items():
            turns[name].append(turn(way))
    engine.close()
    floor = [turn.seconds for turn in turns["bare gloo"]]
    rows = [_row(name, own, floor) for name, own in turns.items()]
    return [*rows, _row("in a step", in_steps, [statistics.median(floor)] * len(in_steps))]


def _real_steps(engine: Engine, config: dict[str, Any]) -> tuple[list[Op], list[Turn]]:
    """Run the pipeline on random gradients, and return the last step's ops with tensors of zeros."""
    torch.manual_seed(dist.get_rank())
    parameters = dict(build("mlp", config["params"]).named_parameters())
    optimizer = torch.optim.SGD(parameters.values(), lr=0.01)
    scheme, exchange = treated(config["scheme"], config["density"])
    pipeline = make_pipeline(parameters, [optimizer], scheme, exchange, engine.rank, engine.world)
    ops: list[Op] = []
    turns = []
    for number in range(_WARM + _STEPS):
        for parameter in parameters.values():
            parameter.grad = torch.randn_like(parameter)
        if pipeline.exchanges_steps:
            optimizer.step()
        dist.barrier()
        before, ops = bytes_out(), []
        pending = pipeline.begin()
        for index in range(len(pipeline.units)):
            engine.run(_noted(pipeline.program(pending, index), ops), f"step {number}", _CPU)
        sent = bytes_out() - before
        pipeline.finish(pending)
        turns.append(Turn(pipeline.stats.seconds.get("exchange", 0.0), sent))
    return [replace(op, tensor=torch.zeros_like(op.tensor)) for op in ops], turns[_WARM:]


def _noted(program: Program[Result], ops: list[Op]) -> Program[Result]:
    def perform(op: Op) -> Program[Tensor]:
        ops.append(op)
        return (yield op)

    return by_way_of(program, perform)


def ask(ops: Sequence[Op]) -> Program[list[Tensor]]:
    """Ask for the ops in order and return the replies."""
    replies = []
    for op in ops:
        replies.append((yield op))
    return replies


def bare(op: Op, group: dist.ProcessGroup) -> Callable[[], object]:
    """The collective that an op stands for, with everything it needs in place."""
    tensor = op.tensor.contiguous().view(-1)
    match op:
        case AllGather():
            everyone = tensor.new_empty(group.size() * tensor.numel())
            return partial(torch_names.all_gather_flat, everyone, tensor, group)
        case AllReduce():
            return partial(dist.all_reduce, tensor, group=group)
        case AllToAll():
            width = tensor.numel() // max(1, op.tensor.shape[0])
            received = tensor.new_empty(width * sum(op.receive_counts))
            receive, send = ([width * each for each in x] for x in (op.receive_counts, op.send_counts))
            return partial(dist.all_to_all_single, received, tensor, receive, send, group=group)
        case _:
            raise ConfigError(
                f"{collectives.describe(op)} is a message between two ranks: choose a scheme that asks for "
                "collectives"
            )


def turn(way: Callable[[], object]) -> Turn:
    dist.barrier()
    before, start = bytes_out(), time.perf_counter()
    for _ in range(_REPEATED):
        way()
    seconds = time.perf_counter() - start
    dist.barrier()
    return Turn(seconds / _REPEATED, (bytes_out() - before) / _REPEATED)


def _row(what: str, turns: Sequence[Turn], floor: Sequence[float]) -> dict[str, Any]:
    ratios = [turn.seconds / bare for turn, bare in zip(turns, floor, strict=True)]
    return {
        "what": what,
        "ms": round(1e3 * statistics.median(turn.seconds for turn in turns), 3),
        "ratio": round(statistics.median(ratios), 3),
        "bytes_sent": int(most_anywhere(statistics.median(turn.bytes_sent for turn in turns))),
        "ms_all": [round(1e3 * turn.seconds, 3) for turn in turns],
    }


if __name__ == "__main__":
    run_rank(measure)
