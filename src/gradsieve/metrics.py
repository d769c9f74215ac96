"""Figures of the last exchange on one rank, by name; docs/recording.md says what each one means."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from gradsieve.pipeline import Pipeline
from gradsieve.replica import Replica
from gradsieve.types import to_host

_PIECE = 1 << 17  # elements that stay in the processor's cache from one sum to the next


def metrics(replica: Replica) -> dict[str, float]:
    pipeline, stats = replica.pipeline, replica.pipeline.stats
    elements = sum(unit.n for unit in pipeline.units)
    residual = look(pipeline)
    reports = pipeline.reports()
    figures: dict[str, float] = {
        "step": pipeline.step,
        "skipped": pipeline.skipped,
        "bits": pipeline.mean_bits,
        "bits_of_step": pipeline.bits(),
        "density": stats.sent / elements if elements else 0.0,
        "bytes_sent": int(stats.meter.sent),
        "bytes_received": int(stats.meter.received),
        "collectives": stats.meter.collectives,
        "residual_norm": residual.norm,
        "staleness": residual.age or 0.0,
        "waiting": residual.share or 0.0,
    }
    figures |= {f"seconds_{stage}": seconds for stage, seconds in stats.seconds.items()}
    figures |= pipeline.report()
    return figures | {key: max(report[key] for report in reports) for key in (reports[0] if reports else ())}


@dataclass(frozen=True, slots=True)
class Look:
    """Describe the residual after an exchange; None stands for what follows only from what was sent."""

    norm: float
    share: float | None  # its norm over that of what was sent
    age: float | None  # exchanges that what is sent now was in it, by Little's law
    contraction: float | None  # |acc - spent|^2 / |acc|^2


def look(pipeline: Pipeline) -> Look:
    """Take a pass over the residual e. As acc = e + spent, none over acc is needed: |acc|^2 = |e|^2 +
    2 e.spent + |spent|^2."""
    sums = torch.zeros(5, dtype=torch.float64, device=pipeline.units[0].device)
    for residual, outcome in zip(pipeline.residuals(), pipeline.outcomes, strict=False):
        for piece in torch.split(residual, _PIECE):
            sums[:2] += torch.stack([piece.norm(1), piece.dot(piece)])
        for part in outcome.spent.parts():
            values = part.values
            sums[2:] += torch.stack([values.norm(1), values.dot(values), values.dot(residual[part.where])])
    left, left_energy, sent, sent_energy, both = to_host(sums).tolist()  # the host waits here, once
    acc = left_energy + 2 * both + sent_energy
    return Look(
        norm=math.sqrt(left_energy) / pipeline.residual_scale,
        share=math.sqrt(left_energy / sent_energy) if sent_energy else None,
        age=left / sent if sent else None,
        contraction=left_energy / acc if acc > 0 else None,
    )
