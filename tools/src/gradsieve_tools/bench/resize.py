"""`gradsieve bench resize`: whether a training that changes its number of ranks ends as one that does not.

Virtual ranks stop at even distances and others, of the next number, go on with what they had, merged as a
checkpoint of another number of ranks is (`checkpoint/rank_state.py`). Examples in a step are as many
throughout.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from gradsieve.errors import ConfigError
from gradsieve.testing import Merger, capture, lockstep, restore, source_rank
from gradsieve_tools.bench.common.machine import one_thread
from gradsieve_tools.bench.common.virtual import Member, Run, exchange, own_batches
from gradsieve_tools.specs import parse, parse_exchange

COLUMNS = ["task", "sync", "ranks", "final", "spread", "seeds", "kept"]
_DATA_APART = 100  # between the seeds of two stretches, so that a rank sees other examples


def measure_all(
    task: str,
    sync: str,
    amount: dict[str, float],
    ways: Sequence[Sequence[int]],
    seeds: int,
    steps: int,
    batch: int,
    advance: Callable[[float, str], None],
) -> list[dict[str, Any]]:
    if any(batch % world for way in ways for world in way):
        raise ConfigError(
            f"{batch} examples of a step cannot be shared evenly by all of {ways}: choose --batch"
        )
    scheme = parse(sync, amount.get("density"))
    rows = []
    for way in ways:
        finals, kept = [], 0.0
        for seed in range(seeds):
            run = Run(
                task,
                scheme,
                parse_exchange("default", scheme),
                seed,
                way[0],
                steps,
                bits=amount.get("bits"),
                batch=batch,
            )
            words = f"{'-'.join(map(str, way))}, seed {seed}"
            with one_thread():
                final, apart = train(run, way, lambda words=words: advance(1, words))  # type: ignore[misc]
            finals.append(final)
            kept = max(kept, apart)
        spread = statistics.stdev(finals) if seeds > 1 else None
        rows.append(
            {
                "task": task,
                "sync": sync,
                "ranks": "-".join(map(str, way)),
                "final": statistics.mean(finals),
                "spread": spread,
                "seeds": seeds,
                "kept": kept,
                "finals": finals,
            }
        )
    return rows


def train(run: Run, way: Sequence[int], after_step: Callable[[], None]) -> tuple[float, float]:
    """The metric at the end, after a flush; and the largest difference that a change of size made to the
    residual."""
    members = [Member(run, rank) for rank in range(run.world)]
    steps, worst, stretch = members[0].training.steps, 0.0, 0
    for step in range(steps):
        if step * len(way) // steps > stretch:
            stretch = step * len(way) // steps
            before = _waits(members)
            members = taken_over(members, replace(run, world=way[stretch]), stretch)
            after = _waits(members)
            worst = max(worst, float((after - before).norm() / before.norm()))
        for member in members:
            member.backward()
        due = [member.pipeline.begins_exchange() for member in members]
        if all(due):
            exchange(members)
        for member in members:
            member.step()
        after_step()
    exchange(members, everything=True)
    return members[0].training.evaluate(), worst


def taken_over(members: Sequence[Member], run: Run, stretch: int) -> list[Member]:
    """Return as many new members as the run has ranks, who go on where these stopped."""
    old, parts = len(members), [capture(member.pipeline) for member in members]
    new = [Member(run, rank) for rank in range(run.world)]
    mergers = [Merger(member.pipeline, old) for member in new]
    for merger in mergers:
        for rank, part in enumerate(parts):
            merger.add(rank, part)
    sources = [parts[source_rank(rank, old)] for rank in range(len(new))]
    merged = lockstep.run([merger.merged(part) for merger, part in zip(mergers, sources, strict=True)])
    for rank, (member, part) in enumerate(zip(new, merged, strict=True)):
        source = members[source_rank(rank, old)].training
        member.training.model.load_state_dict(source.model.state_dict())  # batch norm's statistics
        member.training.optimizer.load_state_dict(copy.deepcopy(source.optimizer.state_dict()))
        member.training.schedule.load_state_dict(source.schedule.state_dict())
        restore(member.pipeline, part)
        seed = run.seed + _DATA_APART * stretch
        member.batches = own_batches(member.training, rank, run.world, run.mixed, seed)
    return new


def _waits(members: Sequence[Member]) -> torch.Tensor:
    total: torch.Tensor | None = None
    for member in members:
        kept = member.pipeline.kept()
        names = member.pipeline.parameters
        own = torch.cat([(kept[f"mark/{name}"] - kept[f"own/{name}"]).double() for name in names])
        total = own if total is None else total + own
    assert total is not None
    return total / len(members)
