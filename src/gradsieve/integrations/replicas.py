"""Whether replicas are the same bits, and started so."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradsieve import wire
from gradsieve.comm.ops import AllGather
from gradsieve.errors import DivergenceError
from gradsieve.feedback import checkpoint
from gradsieve.feedback.digest import digest
from gradsieve.integrations.agreement import against_the_majority, agree_on, agree_on_values
from gradsieve.sync import StepPipeline
from gradsieve.types import Program, replicated_fields

if TYPE_CHECKING:
    from gradsieve.integrations.gradient_sync import GradientSync


def start_alike(sync: GradientSync, dense_if_faster: bool) -> None:
    """Raise on all ranks unless they were given the same settings, layout and weights."""
    pipeline, rank = sync.pipeline, sync.engine.rank
    layout = repr([[(slot.name, slot.numel, slot.sparse) for slot in unit.slots] for unit in pipeline.units])
    elements = sum(slot.numel for unit in pipeline.units for slot in unit.slots)
    things = {
        "the version of gradsieve's messages": str(wire.VERSION),
        "scheme": type(sync.scheme).__name__,
        "density": f"{sync.scheme.density:g}",
        "the scheme's settings": repr(sync.scheme),
        "preset": sync.treatment.describe(),
        "bits": str(sync.fixed and sync.fixed.bits),
        "dense_if_faster": str(dense_if_faster),
        "the model": f"{len(sync.parameters)} parameters of {elements} elements, laid out as {layout}",
        "types": ", ".join(sorted({str(p.dtype) for p in sync.parameters.values()})),
    }
    sync.engine.run(agree_on(things, rank, sync.device), "the comparison of settings", sync.device)
    weights = {name: p.detach() for name, p in sync.parameters.items()}
    sync.engine.run(agree_on_values(weights, rank, sync.device), "the comparison of weights", sync.device)


def compare(sync: GradientSync) -> None:
    """Raise DivergenceError on all ranks unless what is replicated has the same bits on all of them."""
    what = f"the comparison of replicas after step {sync.pipeline.step}"
    sync.engine.run(_compared(sync), what, sync.device)


def _compared(sync: GradientSync) -> Program[None]:
    everyone = yield AllGather(digest(_replicated(sync)).to(sync.device))
    hashes = everyone.flatten().tolist()
    if len(set(hashes)) > 1:
        raise DivergenceError(
            f"rank {sync.engine.rank}: replicas differ after step {sync.pipeline.step}; "
            f"{against_the_majority(hashes)}. Something outside the exchange changed parameters or state on "
            "some ranks only (rank-dependent code, a partly loaded checkpoint). Restart all ranks from one "
            "checkpoint."
        )


def _replicated(sync: GradientSync) -> list[Tensor]:
    pipeline = sync.pipeline
    tensors = [torch.tensor([pipeline.step], dtype=torch.int64, device="cpu")]
    if isinstance(pipeline, StepPipeline):
        tensors += [part for local in pipeline.local for part in (local.shared, local.shared_dense)]
        tensors.append(torch.tensor(list(pipeline.figures().values()), dtype=torch.float64, device="cpu"))
    else:
        tensors += sync.parameters.values()
    for state in pipeline.states:
        fields = checkpoint.fields_to_tensors(state, "")
        tensors.extend(fields[name] for name in replicated_fields(state))
    return tensors
