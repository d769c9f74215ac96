"""Whether replicas are the same bits, and started so."""

from __future__ import annotations

import torch
from torch import Tensor

from gradsieve import version, wire
from gradsieve.comm.ops import AllGather
from gradsieve.consensus import optimizers
from gradsieve.consensus.handshake import agree_on, agree_on_values, differing
from gradsieve.errors import DivergenceError
from gradsieve.feedback import checkpoint
from gradsieve.feedback.digest import digest
from gradsieve.pipeline import StepPipeline
from gradsieve.replica.replica import Replica
from gradsieve.types import Program, replicated_fields


def start_alike(replica: Replica, deterministic: bool) -> None:
    """Raise on all ranks unless they were given the same settings, layout and weights."""
    pipeline, rank = replica.pipeline, replica.rank
    layout = repr([[(slot.name, slot.numel, slot.sparse) for slot in unit.slots] for unit in pipeline.units])
    elements = sum(slot.numel for unit in pipeline.units for slot in unit.slots)
    things = {
        "the version of gradsieve": version.VERSION,
        "the version of gradsieve's messages": str(wire.VERSION),
        "scheme": type(replica.scheme).__name__,
        "density": f"{replica.scheme.density:g}",
        "the scheme's settings": repr(replica.scheme),
        "exchange": replica.settings.describe(),
        "bits": str(replica.fixed and replica.fixed.bits),
        "deterministic": str(deterministic),
        "the model": f"{len(replica.parameters)} parameters of {elements} elements, laid out as {layout}",
        "types": ", ".join(sorted({str(p.dtype) for p in replica.parameters.values()})),
        **optimizers.compared(replica.held, replica.optimizers),
    }
    if replica.is_elastic:
        del things["learning rates"]
    replica.engine.run(agree_on(things, rank, replica.device), "the comparison of settings", replica.device)
    weights = {name: p.detach() for name, p in replica.parameters.items()}
    replica.engine.run(
        agree_on_values(weights, rank, replica.device), "the comparison of weights", replica.device
    )
    optimizers.refuse(replica.held, replica.optimizers, rank)


def compare(replica: Replica) -> None:
    """Raise DivergenceError on all ranks unless what is replicated has the same bits on all of them."""
    what = f"the comparison of replicas after step {replica.pipeline.step}"
    replica.engine.run(_compared(replica), what, replica.device)


def _compared(replica: Replica) -> Program[None]:
    mine = replicated(replica)
    everyone = yield AllGather(digest(list(mine.values())).to(replica.device))
    if len(set(everyone.flatten().tolist())) > 1:
        where = yield from differing(mine, replica.device)
        raise DivergenceError(
            f"rank {replica.rank}: replicas differ after step {replica.pipeline.step}; {where}. Something "
            "outside the exchange changed parameters or state on some ranks only (rank-dependent code, a "
            "partly loaded checkpoint). Restart all ranks from one checkpoint."
        )


def replicated(replica: Replica) -> dict[str, Tensor]:
    """What has the same bits on all ranks, by names for people."""
    pipeline = replica.pipeline
    figures = [float(pipeline.step)]
    if isinstance(pipeline, StepPipeline):
        kept = pipeline.kept().items()
        tensors = {key.partition("/")[2]: part for key, part in kept if key.startswith("shared/")}
        figures += pipeline.figures().values()
    else:
        tensors = dict(replica.parameters)
        tensors |= {key: part for key, part in pipeline.kept().items() if key.startswith("total/")}
    tensors["step and figures"] = torch.tensor(figures, dtype=torch.float64, device="cpu")
    for index, state in enumerate(pipeline.states):
        fields = checkpoint.fields_to_tensors(state, "")
        of_unit = f"of unit {index}" if len(pipeline.states) > 1 else "of the scheme"
        tensors |= {f"{name} {of_unit}": fields[name] for name in replicated_fields(state)}
    return tensors
