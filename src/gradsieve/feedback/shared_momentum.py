"""Momentum as all ranks have it: a rank's own noise is taken out of its optimizer's.

What a rank's own batch made it step is averaged away when it is sent. But an optimizer with momentum has that
batch in its memory, and goes on in its direction for ten steps more. With many ranks most of a rank's
momentum is noise of this kind. Its residual is then full of it, and its own model says little of where all
ranks are.

    d   what this rank moved, less what all ranks moved in the mean, since this was last done: own noise
    p   where its momentum leads, m / (sqrt(v) + eps) with Adam

    m -= c <p, d> / <d, d> d (sqrt(v) + eps)

That is the multiple of d which leaves the least of p, measured and not assumed: no learning rate, number of
steps or decay is in it. Of p the part that all ranks have is orthogonal to d, but for chance. c is below 1,
since what all ranks moved was rounded, and that error is in d on all of them. A projection never lengthens p,
so that no momentum grows. Nothing travels for it, and no rule of an exchange knows of it: only optimizers'
later steps are others.

Shares are measured for every CHUNK elements of a parameter. Memory: n elements (`LocalSteps.common`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from gradsieve.feedback.step_length import state_made_by
from gradsieve.feedback.units import flat_view
from gradsieve.torch_names import plain_part_of

PART = 0.75
"""c: from 0.6 to 0.8 16 ranks end alike, with 1 higher (ADR 50)."""
LEAST_STEPS = 3
"""Own noise is looked at over so many steps at least: in one step the rounding of the sum is as large as what
was moved."""
CHUNK = 1 << 16
"""Elements that are in a processor's cache from the first pass to the last."""
_FIRST, _SECOND = "exp_avg", "exp_avg_sq"


def has_moments(optimizer: Any) -> bool:
    """Whether it remembers Adam's two moments of every parameter, under torch's names; found by trial."""
    for number, parameter in enumerate(each for group in optimizer.param_groups for each in group["params"]):
        if not parameter.is_floating_point():
            return False
        try:
            state = state_made_by(optimizer, number)
        except Exception:  # `step_length.py` says so to the user where it matters
            return False
        return _of(state, plain_part_of(parameter.detach())) is not None
    return False


class Moments:
    """Those of all optimizers that step the parameters of one sync."""

    def __init__(self, held: Mapping[str, Tensor]) -> None:
        """`held`: by name, what the optimizers have."""
        self._held = held

    def take_out(self, optimizer: Any, noise: Iterable[tuple[str, slice, Tensor]]) -> None:
        """Own noise of parameters that the optimizer is about to step: name, place in it and d, which is
        written to."""
        groups = optimizer.param_groups
        eps = {id(each): group.get("eps", 0.0) for group in groups for each in group["params"]}
        known: dict[str, tuple[Tensor, Tensor] | None] = {}
        for name, here, own in noise:
            parameter = self._held[name]
            if name not in known:
                known[name] = _of(optimizer.state.get(parameter, {}), plain_part_of(parameter.detach()))
            if (moments := known[name]) is not None:
                first, second = moments
                take_out(first[here], second[here], eps.get(id(parameter), 0.0), own)


def take_out(first: Tensor, second: Tensor, eps: float, noise: Tensor) -> None:
    """Of these elements; `noise` is written to."""
    scale = second.to(noise.dtype, copy=True).sqrt_().add_(eps)
    leads = first.to(noise.dtype) / scale
    share = torch.dot(leads, noise) / torch.dot(noise, noise)
    share = torch.nan_to_num(share.clamp_min(0.0), 0.0, 0.0, 0.0)  # 0 / 0 where nothing was moved
    first.sub_(noise.mul_(scale).mul_(share * PART))


def _of(state: Mapping[str, Any], parameter: Tensor) -> tuple[Tensor, Tensor] | None:
    """Both moments of a parameter, flat, in the order in which its elements lie in memory."""
    found: list[Tensor] = []
    for key in (_FIRST, _SECOND):
        moment = state.get(key)
        if not isinstance(moment, Tensor) or type(plain := plain_part_of(moment)) is not Tensor:
            return None
        if (
            not plain.is_floating_point()
            or plain.shape != parameter.shape
            or plain.stride() != parameter.stride()
            or plain.device != parameter.device
        ):
            return None
        found.append(flat_view(plain))
    return found[0], found[1]
