"""Signs that a run drifts toward trouble, and one warning that names the setting to change.

    staleness   age in steps of what is sent now, by Little's law: the residual over what is sent
    waiting     norm of the residual over that of what was sent
    fidelity    energy of what was sent, over the most that as many of this rank's elements hold

The limits are those beyond which trainings ended visibly worse in docs/studies/training-quality.md.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradsieve.pipeline import Pipeline
from gradsieve.schemes.base import Scheme
from gradsieve.schemes.baselines.topk import TopK
from gradsieve.schemes.exdyna import ExDyna
from gradsieve.types import Outcome, Sparse

_log = logging.getLogger("gradsieve")

STALE = 1000.0
HEAVY, HEAVY_ADAPTIVE = 30.0, 12.0
"""An adaptive optimizer (all but SGD) moves elements of small gradients as far as others: more of what it
moves has to be sent."""
BLIND = 0.05
_SAMPLE = 1 << 16


def signs(waiting: Iterable[Tensor], outcomes: Sequence[Outcome[Any]]) -> dict[str, float]:
    """Of the last step, on this rank; a pass over the residual, and a look at a sample of it."""
    left = gone = left_energy = gone_energy = best = 0.0
    for kept, outcome in zip(waiting, outcomes, strict=False):
        spent = outcome.spent
        left += float(kept.norm(1))
        gone += float(spent.values.norm(1))
        left_energy += float(kept.norm()) ** 2
        gone_energy += float(spent.values.norm()) ** 2
        best += _most_energy(kept, spent)
    if not gone_energy:
        return {"staleness": 0.0, "waiting": 0.0, "fidelity": 1.0}
    return {
        "staleness": left / gone,
        "waiting": (left_energy / gone_energy) ** 0.5,
        "fidelity": min(1.0, gone_energy / best) if best else 1.0,
    }


def signs_of(pipeline: Pipeline) -> dict[str, float]:
    return signs(pipeline.waiting(), pipeline.outcomes)


def _most_energy(kept: Tensor, spent: Sparse) -> float:
    """Of as many elements as were spent, chosen best; estimated from elements at equal distances."""
    if spent.count == spent.numel or not spent.count:
        return float(spent.values.norm()) ** 2
    stride = max(1, kept.numel() // _SAMPLE)
    sample, indices = kept[::stride].clone(), spent.listed()
    seen = indices % stride == 0
    sample[indices[seen] // stride] += spent.values[seen]
    best = torch.topk(sample.abs(), max(1, round(spent.count / stride)), sorted=False).values
    return stride * float(best.norm()) ** 2


def advice(signs: Mapping[str, float], density: float, adaptive: bool, looks: bool = False) -> str | None:
    """What to change, or None while there is nothing to say. `looks`: the scheme in use chooses by value."""
    heavy = HEAVY_ADAPTIVE if adaptive else HEAVY
    if signs["staleness"] > STALE or signs["waiting"] > heavy:
        excess = max(signs["staleness"] / STALE, signs["waiting"] / heavy)
        raised = min(1.0, 2 * excess * density)
        return (
            f"the residual is {signs['waiting']:.0f} times what is sent, and about {signs['staleness']:.0f} "
            f"steps old: raise density from {density:g} to {raised:.2g}, or send everything now and then "
            "with exchange=gradsieve.Steps(refresh=1000)"
        )
    if signs["fidelity"] < BLIND:
        change = (
            f"raise density from {density:g} to {min(1.0, 4 * density):.2g}"
            if looks
            else "choose scheme='exdyna' or 'topk', which look at the values"
        )
        return (
            f"what is sent holds {signs['fidelity']:.1%} of the energy that as many elements could: {change}"
        )
    return None


class Advisor:
    """Says it once, on the rank that sees it."""

    def __init__(self, scheme: Scheme[Any], adaptive: bool, rank: int) -> None:
        self.density, self.adaptive, self.rank = scheme.density, adaptive, rank
        self.looks = isinstance(scheme, ExDyna | TopK)
        self.has_warned = scheme.round_robin
        """Round robin, nothing is selected, and nothing is in the residual for longer than a round."""

    def look(self, signs: Mapping[str, float], step: int) -> None:
        text = None if self.has_warned else advice(signs, self.density, self.adaptive, self.looks)
        if text is not None:
            self.has_warned = True
            _log.warning("rank %d, step %d: %s", self.rank, step, text)
