"""What ranks compute in an exchange, beside its collectives, and how far the model of costs is from it.

    for P in 2 4; do gradsieve lab run --hosts $P -- python benchmarks/plan_computed.py >> F; done

One line of JSON for each scheme, size and density, of the mean rank: milliseconds, and what the cost model
says from the host's speed at that moment.
"""

from __future__ import annotations

import json
import statistics
import time

import torch
import torch.distributed as dist
from torch import Tensor

from gradsieve.comm.engine import Engine
from gradsieve.comm.links import nominal
from gradsieve.comm.ops import Op
from gradsieve.types import Program, by_way_of
from gradsieve_tools.costs import Costs, Host
from gradsieve_tools.doctor import speed
from gradsieve_tools.plan.options import PASSES
from gradsieve_tools.plan_validation.worker import Alone

SCHEMES = ("topk", "exdyna", "deft", "oktopk", "spardl", "stripes")
SIZES, DENSITIES = (2_000_000, 8_000_000), (0.01, 0.001)
WARM, TURNS = 9, 7


def computed(alone: Alone) -> float:
    """Seconds of an exchange that are not spent in its collectives, the median of some turns."""
    waited = 0.0

    def timed(op: Op) -> Program[Tensor]:
        nonlocal waited
        start = time.perf_counter()
        reply = yield op
        waited += time.perf_counter() - start
        return reply

    own = []
    for _ in range(WARM + TURNS):
        alone.renew()
        dist.barrier()
        start, waited = time.perf_counter(), 0.0
        alone.exchange(lambda program: by_way_of(program, timed))
        own.append(time.perf_counter() - start - waited)
    return statistics.median(own[WARM:])


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    engine = Engine()
    dist.barrier()
    host = speed.measure()
    costs = Costs(engine.world, nominal(engine.world), Host(host.memory, host.selection, 0.0))
    for n in SIZES:
        for density in DENSITIES:
            for sync in SCHEMES:
                torch.manual_seed(engine.rank)
                alone = Alone(sync, n, density, engine)
                mean = torch.tensor([computed(alone)], dtype=torch.float64) / engine.world
                dist.all_reduce(mean)
                pipeline = alone.adapter.pipeline
                size = sum(parameter.numel() for parameter in alone.adapter.parameters.values())
                told = costs.of_scheme(pipeline.scheme, size, len(pipeline.units), PASSES).computed
                row = {"world": engine.world, "sync": sync, "n": size, "density": density}
                row |= {"ms": 1e3 * mean.item(), "predicted_ms": 1e3 * told, "off": told / mean.item() - 1}
                row |= {"memory_gb_s": host.memory / 1e9, "selection_m_s": host.selection / 1e6}
                if engine.rank == 0:
                    print(json.dumps(row), flush=True)
    dist.barrier()
    engine.close()


if __name__ == "__main__":
    main()
