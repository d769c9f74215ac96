"""Whether replicas are the same bits, and started so."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

import gradsieve
from gradsieve import wire
from gradsieve.comm.ops import AllGather
from gradsieve.errors import DivergenceError
from gradsieve.feedback import checkpoint
from gradsieve.feedback.digest import digest
from gradsieve.integrations import strangers
from gradsieve.integrations.agreement import agree_on, agree_on_values, unlike
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
        "the version of gradsieve": gradsieve.__version__,
        "the version of gradsieve's messages": str(wire.VERSION),
        "scheme": type(sync.scheme).__name__,
        "density": f"{sync.scheme.density:g}",
        "the scheme's settings": repr(sync.scheme),
        "preset": sync.treatment.describe(),
        "bits": str(sync.fixed and sync.fixed.bits),
        "dense_if_faster": str(dense_if_faster),
        "the model": f"{len(sync.parameters)} parameters of {elements} elements, laid out as {layout}",
        "types": ", ".join(sorted({str(p.dtype) for p in sync.parameters.values()})),
        **strangers.compared(sync.held, sync.fitted.optimizers),
    }
    if getattr(sync, "is_elastic", False):
        del things["learning rates"]
    sync.engine.run(agree_on(things, rank, sync.device), "the comparison of settings", sync.device)
    weights = {name: p.detach() for name, p in sync.parameters.items()}
    sync.engine.run(agree_on_values(weights, rank, sync.device), "the comparison of weights", sync.device)
    strangers.refuse(sync.held, sync.fitted.optimizers, rank)


def compare(sync: GradientSync) -> None:
    """Raise DivergenceError on all ranks unless what is replicated has the same bits on all of them."""
    what = f"the comparison of replicas after step {sync.pipeline.step}"
    sync.engine.run(_compared(sync), what, sync.device)


def _compared(sync: GradientSync) -> Program[None]:
    mine = replicated(sync)
    everyone = yield AllGather(digest(list(mine.values())).to(sync.device))
    if len(set(everyone.flatten().tolist())) > 1:
        where = yield from unlike(mine, sync.device)
        raise DivergenceError(
            f"rank {sync.engine.rank}: replicas differ after step {sync.pipeline.step}; {where}. Something "
            "outside the exchange changed parameters or state on some ranks only (rank-dependent code, a "
            "partly loaded checkpoint). Restart all ranks from one checkpoint."
        )


def replicated(sync: GradientSync) -> dict[str, Tensor]:
    """What has the same bits on all ranks, by names for people."""
    pipeline = sync.pipeline
    figures = [float(pipeline.step)]
    if isinstance(pipeline, StepPipeline):
        kept = pipeline.kept().items()
        tensors = {key.partition("/")[2]: part for key, part in kept if key.startswith("shared/")}
        figures += pipeline.figures().values()
    else:
        tensors = dict(sync.parameters)
        tensors |= {key: part for key, part in pipeline.kept().items() if key.startswith("total/")}
    tensors["step and figures"] = torch.tensor(figures, dtype=torch.float64, device="cpu")
    for index, state in enumerate(pipeline.states):
        fields = checkpoint.fields_to_tensors(state, "")
        of_unit = f"of unit {index}" if len(pipeline.states) > 1 else "of the scheme"
        tensors |= {f"{name} {of_unit}": fields[name] for name in replicated_fields(state)}
    return tensors
