"""Bytes that a worker receives, a parameter and step, as peers become more: ours, and a gather beside it.

    python benchmarks/peers.py --json benchmarks/results/peers-DATE.json

Real exchanges of P virtual ranks that hold the transformer of `bench accuracy`, every 30 steps, counted by
each rank's meter. What ranks moved is made up: bytes do not depend on it.
"""

import argparse
from pathlib import Path

import torch

from gradsieve.comm import lockstep
from gradsieve.pipeline.budget import Budget
from gradsieve.pipeline.exchange_settings import Steps
from gradsieve.pipeline.steps import StepPipeline
from gradsieve_tools import results
from gradsieve_tools.bench.tasks import training as tasks
from gradsieve_tools.specs import parse

EVERY, EXCHANGES = 30, 12
WAYS = {
    "stripes, a budget of 0.03 bits": ("stripes", 1.0, 0.03),
    "stripes, all as signs": ("stripes:values=sign", 1.0, None),
    "topk, 1 % gathered": ("topk", 0.01, None),
}
COLUMNS = ["way", "world", "bits_received", "over_4_peers"]


def received(scheme: str, density: float, bits: float | None, world: int) -> float:
    """Bits a parameter and step, of the rank that receives most."""
    models = [dict(tasks.TASKS["transformer"].model().named_parameters()) for _ in range(world)]
    treatment = Steps(every=EVERY)
    ranks = [
        StepPipeline(model.items(), parse(scheme, density), rank, world, treatment=treatment)
        for rank, model in enumerate(models)
    ]
    total = 0.0
    for pipeline in ranks:
        pipeline.budget = None if bits is None else Budget(bits)
    for _ in range(EXCHANGES):
        for pipeline in ranks:
            for part in pipeline.own.values():
                part -= torch.rand(1) * 1e-3 * part
        for index in range(len(ranks[0].units)):
            lockstep.run([pipeline.program(index, pipeline.own) for pipeline in ranks])
        for pipeline in ranks:
            pipeline.finish(pipeline.own)
        total += max(pipeline.stats.meter.received for pipeline in ranks)
    return 8 * total / ranks[0].parameters / EXCHANGES / EVERY


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--world", default="4,32", help="numbers of ranks, the first to compare with")
parser.add_argument("--json", type=Path)
args = parser.parse_args()
results.writable(args.json)
rows = []
for way, settings in WAYS.items():
    found = {int(world): received(*settings, int(world)) for world in args.world.split(",")}
    least = next(iter(found.values()))
    rows += [
        {"way": way, "world": world, "bits_received": round(bits, 4), "over_4_peers": round(bits / least, 3)}
        for world, bits in found.items()
    ]
print(results.table(rows, COLUMNS))
if args.json is not None:
    results.write(args.json, {"every": EVERY, "exchanges": EXCHANGES}, rows)
