"""A sync's state, out and in: every rank its own, all ranks or none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradsieve.comm.ops import AllGather
from gradsieve.errors import Malformed, MismatchError, list_ranks
from gradsieve.feedback import checkpoint
from gradsieve.feedback.digest import digest
from gradsieve.feedback.units import shaped_like
from gradsieve.integrations.agreement import against_the_majority
from gradsieve.sync import StepPipeline
from gradsieve.types import Program

if TYPE_CHECKING:
    from gradsieve.integrations.gradient_sync import GradientSync


@dataclass(frozen=True, slots=True)
class Loaded:
    """A checkpoint of one rank, checked."""

    step: int
    figures: dict[str, float]
    memories: dict[str, Tensor]
    states: list[Any]

    def fingerprint(self) -> int:
        """Of what has to be the same on all ranks."""
        shared = [part for key, part in self.memories.items() if key.startswith("shared/")]
        figures = torch.tensor(list(self.figures.values()), dtype=torch.float64, device="cpu")
        return int(digest([figures, *shared]))


def state_of(sync: GradientSync) -> dict[str, Tensor]:
    pipeline, prefix = sync.pipeline, f"rank{sync.engine.rank}/"
    out = {
        "format": checkpoint.number_to_tensor(checkpoint.FORMAT),
        "world": checkpoint.number_to_tensor(pipeline.world),
        "step": checkpoint.number_to_tensor(pipeline.step),
        "scheme": checkpoint.text_to_tensor(type(sync.scheme).__name__),
    }
    for name, figure in pipeline.figures().items():
        out[f"figure/{name}"] = checkpoint.number_to_tensor(figure)
    for key, part in _memories(sync).items():
        out[key] = shaped_like(part, _parameter(sync, key)).clone()
    for index, state in enumerate(pipeline.states):
        out.update(checkpoint.fields_to_tensors(state, f"unit/{index}/"))
    return {prefix + key: value for key, value in out.items()}


def load(sync: GradientSync, stored: Mapping[str, Tensor]) -> None:
    """All of it is checked, on all ranks, before any is used on one."""
    problem: Malformed | None = None
    loaded: Loaded | None = None
    try:
        loaded = _checked(sync, stored)
    except Malformed as error:
        problem = error
    if sync.engine.world > 1 and not sync.scheme.silent:
        sync.engine.run(_alike(sync, loaded, problem), "the comparison of checkpoints", sync.device)
    if loaded is None:
        assert problem is not None
        raise problem
    pipeline = sync.pipeline
    pipeline.step, pipeline.states = loaded.step, loaded.states
    pipeline.set_figures(loaded.figures)
    for key, part in _memories(sync).items():
        shaped_like(part, _parameter(sync, key)).copy_(loaded.memories[key])
    if isinstance(pipeline, StepPipeline):
        pipeline.renew()


def _alike(sync: GradientSync, loaded: Loaded | None, problem: Malformed | None) -> Program[None]:
    rank, device = sync.engine.rank, sync.device
    mine = [1, loaded.step, loaded.fingerprint()] if loaded is not None else [0, 0, 0]
    rows = (yield AllGather(torch.tensor(mine, dtype=torch.int64, device=device))).tolist()
    if problem is not None:
        raise problem
    bad = [number for number, row in enumerate(rows) if not row[0]]
    if bad:
        raise MismatchError(
            f"rank {rank}: {list_ranks(bad)} could not load a checkpoint (the reason is in the error there), "
            "so nothing was loaded on any rank"
        )
    steps = [row[1] for row in rows]
    if len(set(steps)) > 1:
        each = ", ".join(f"rank {number} step {step}" for number, step in list(enumerate(steps))[:8])
        raise MismatchError(
            f"rank {rank}: ranks loaded checkpoints of different steps ({each}); nothing was loaded. Give "
            "all ranks the checkpoint of one step"
        )
    prints = [row[2] for row in rows]
    if len(set(prints)) > 1:
        raise MismatchError(
            f"rank {rank}: the checkpoints of step {steps[0]} hold different shared models; "
            f"{against_the_majority(prints)}; nothing was loaded. Give all ranks the checkpoint of one run"
        )


def _checked(sync: GradientSync, stored: Mapping[str, Tensor]) -> Loaded:
    pipeline, prefix = sync.pipeline, f"rank{sync.engine.rank}/"
    scheme = checkpoint.text_to_tensor(type(sync.scheme).__name__)
    for key, expected in (("format", checkpoint.FORMAT), ("world", pipeline.world)):
        found = int(checkpoint.take(stored, prefix + key, (), torch.int64))
        if found != expected:
            raise Malformed(f"the checkpoint's {key} is {found}, this run's is {expected}")
    saved_by = checkpoint.take(stored, prefix + "scheme", None, torch.uint8)
    if not torch.equal(saved_by, scheme):
        raise Malformed(f"the checkpoint is of scheme {checkpoint.tensor_to_text(saved_by)}")
    return Loaded(
        int(checkpoint.take(stored, prefix + "step", (), torch.int64)),
        {
            name: float(checkpoint.take(stored, f"{prefix}figure/{name}", (), torch.float64))
            for name in pipeline.figures()
        },
        {
            key: checkpoint.take(stored, prefix + key, tuple(_parameter(sync, key).shape), part.dtype)
            for key, part in _memories(sync).items()
        },
        [
            checkpoint.fields_from_tensors(
                sync.scheme.lay(unit.sizes, pipeline.world), stored, f"{prefix}unit/{index}/"
            )
            for index, unit in enumerate(pipeline.units)
        ],
    )


def _memories(sync: GradientSync) -> dict[str, Tensor]:
    """Flat views by kind/parameter. A rank's own model is one: no other rank can save it."""
    out = dict(sync.pipeline.memories())
    if isinstance(sync.pipeline, StepPipeline):
        out |= {f"own/{name}": own for name, own in sync.pipeline.own.items()}
    return out


def _parameter(sync: GradientSync, key: str) -> Tensor:
    return sync.parameters[key.partition("/")[2]]
