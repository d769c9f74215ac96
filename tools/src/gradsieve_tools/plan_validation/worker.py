"""One rank of `gradsieve bench plan`: every sync's exchange alone, computing of its own included.

A turn is one exchange of the whole pipeline on random gradients, after a barrier; it has taken as long as the
slowest rank. torch's dense and fp16 exchange one vector as long as the model.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from gradsieve.comm.engine import Engine
from gradsieve.schemes import Ctx, Program
from gradsieve.testing import make_pipeline
from gradsieve_tools.bench.common.in_lab import Rows, most_anywhere, run_rank, tell
from gradsieve_tools.bench.common.syncs import treated
from gradsieve_tools.bench.common.workloads import build
from gradsieve_tools.link_costs import measure_all

_WARM = 10  # exchanges until thresholds are found; torch's own need two
_CPU = torch.device("cpu")
Exchange = Callable[[], None]


def measure(config: dict[str, Any]) -> Rows:
    torch.manual_seed(dist.get_rank())
    engine = Engine()
    engine.links = engine.run(measure_all(Ctx(engine.rank, engine.world, 0), _CPU), "the links", _CPU)
    rows: Rows = []
    for sync in config["syncs"]:
        ours = sync not in ("dense", "fp16")
        turns = _of_ours(sync, engine, config) if ours else _of_torch(sync, config["params"])
        for _ in range(_WARM if ours else 2):
            next(turns)()
        seconds = [_timed(next(turns)) for _ in range(config["turns"])]
        rows.append({"sync": sync, "exchange_ms": 1e3 * statistics.median(seconds)})
        tell(f"{sync}: an exchange takes {rows[-1]['exchange_ms']:.2f} ms")
    engine.close()
    return rows


def _timed(exchange: Exchange) -> float:
    dist.barrier()
    start = time.perf_counter()
    exchange()
    return most_anywhere(time.perf_counter() - start)


def _of_torch(sync: str, n: int) -> Iterator[Exchange]:
    vector = torch.randn(n, dtype=torch.float32, device=_CPU)

    def whole() -> None:
        dist.all_reduce(vector)
        vector.div_(dist.get_world_size())

    def half() -> None:
        cast = vector.to(torch.float16).div_(dist.get_world_size())
        dist.all_reduce(cast)
        vector.copy_(cast)

    while True:
        yield whole if sync == "dense" else half


def _of_ours(sync: str, engine: Engine, config: dict[str, Any]) -> Iterator[Exchange]:
    alone = Alone(sync, config["params"], config["density"], engine)
    while True:
        alone.renew()
        yield alone.exchange


class Alone:
    """A sync's exchange without a training: random gradients, and the optimizer's part of it."""

    def __init__(self, sync: str, params: int, density: float, engine: Engine) -> None:
        self._sync, self._engine = sync, engine
        parameters = dict(build("mlp", params).named_parameters())
        self._optimizer = torch.optim.SGD(parameters.values(), lr=0.01)
        scheme, exchange = treated(sync, density)
        stepped = [self._optimizer]
        self.pipeline = make_pipeline(parameters, stepped, scheme, exchange, engine.rank, engine.world)

    def renew(self) -> None:
        for parameter in self.pipeline.parameters.values():
            parameter.grad = torch.randn_like(parameter)
        if self.pipeline.exchanges_steps:
            self._optimizer.step()

    def exchange(self, around: Callable[[Program[Any]], Program[Any]] = lambda program: program) -> None:
        """`around`: what is put around each unit's program."""
        pending = self.pipeline.begin()
        for index in range(len(self.pipeline.units)):
            self._engine.run(around(self.pipeline.program(pending, index)), self._sync, _CPU)
        self.pipeline.finish(pending)


if __name__ == "__main__":
    run_rank(measure)
