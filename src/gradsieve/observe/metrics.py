"""What `metrics()` says of the last step, among other things:

bits        moved by this rank, a parameter and step: in the mean over some (`pipeline/round_robin.py`)
link        seconds of the exchange over those for which nobody needed it: 1 fills them
staleness   exchanges for which what is sent now was in the residual
rho         square of the mean gradient's length over that of a rank's own
budget      bits that the next step may send; 0 where a density is given
"""

from __future__ import annotations

from typing import Any

import torch

from gradsieve.observe.diagnostics import signs_of
from gradsieve.pipeline import StepPipeline
from gradsieve.replica.replica import Replica


def metrics(replica: Replica, slack: float) -> dict[str, Any]:
    """`slack`: seconds for which nobody needed the last exchange."""
    pipeline, stats = replica.pipeline, replica.pipeline.stats
    elements = sum(unit.n for unit in pipeline.units)
    norms = [waiting.norm() for waiting in pipeline.waiting()]
    reports = [replica.scheme.report(state) for state in pipeline.states]
    return {
        "step": pipeline.step,
        "skipped": pipeline.skipped,
        "bits": pipeline.turns.bits,
        "bits_of_step": pipeline.bits(),
        "link": pipeline.seconds() / slack if slack else 0.0,
        "density": stats.sent / elements if elements else 0.0,
        "bytes_sent": int(stats.meter.sent),
        "bytes_received": int(stats.meter.received),
        "collectives": stats.meter.collectives,
        "seconds": dict(stats.seconds),
        "residual_norm": float(torch.stack(norms).norm()) if norms else 0.0,
        **signs_of(pipeline),
        **(_of_steps(pipeline) if isinstance(pipeline, StepPipeline) else {}),
        **{key: max(report[key] for report in reports) for key in (reports[0] if reports else {})},
    }


def _of_steps(pipeline: StepPipeline) -> dict[str, float]:
    budget = 0.0 if pipeline.budget is None else pipeline.budget.target
    return {"preview": pipeline.preview, "rho": pipeline.rho, "budget": budget}
