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

Shares are measured for each parameter, in pieces of at most CHUNK elements. Memory: n elements
(`LocalSteps.common`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradsieve.feedback.step_length import state_made_by
from gradsieve.feedback.units import flat_view
from gradsieve.torch_names import copy_all, plain_part_of

PART = 0.75
"""c: from 0.6 to 0.8 16 ranks end alike, with 1 higher (ADR 50)."""
LEAST_STEPS = 3
"""Own noise is looked at over so many steps at least: in one step the rounding of the sum is as large as what
was moved."""
CHUNK, LARGE_CHUNK = 1 << 16, 1 << 22
"""Elements that are looked at together: on a processor as many as stay in its cache from the first pass to
the last, on an accelerator more, where what counts is launches."""
_FIRST, _SECOND = "exp_avg", "exp_avg_sq"

Noise = tuple[list[tuple[str, slice]], Tensor]
"""Pieces of parameters (name and place in it), and their own noise end to end."""


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

    def take_out(self, optimizer: Any, noise: Iterable[Noise]) -> None:
        """Own noise of parameters that the optimizer is about to step."""
        groups = optimizer.param_groups
        eps = {id(each): group.get("eps", 0.0) for group in groups for each in group["params"]}
        known: dict[str, tuple[Tensor, Tensor] | None] = {}
        for pieces, own in noise:
            alike: defaultdict[float, list[tuple[Tensor, Tensor, Tensor]]] = defaultdict(list)
            parts = torch.split(own, [here.stop - here.start for _, here in pieces])
            for (name, here), part in zip(pieces, parts, strict=True):
                parameter = self._held[name]
                if name not in known:
                    known[name] = _of(optimizer.state.get(parameter, {}), plain_part_of(parameter.detach()))
                if (moments := known[name]) is not None:
                    first, second = moments
                    alike[float(eps.get(id(parameter), 0.0))].append((first[here], second[here], part))
            for size, together in alike.items():
                take_out(together, size)


def take_out(pieces: Sequence[tuple[Tensor, Tensor, Tensor]], eps: float) -> None:
    """Of pieces with both moments and own noise, each by a share of its own. On an accelerator most launches
    are for all of them."""
    firsts, seconds, noises = zip(*pieces, strict=True)
    sizes = [each.numel() for each in noises]
    noise = torch.cat(noises)
    scale = torch.cat(seconds).to(noise.dtype).sqrt_().add_(eps)
    first = torch.cat(firsts).to(noise.dtype)
    leads = torch.split(first / scale, sizes)
    shares = torch.stack([torch.dot(*pair) for pair in zip(leads, noises, strict=True)])
    shares /= torch.stack([torch.dot(own, own) for own in noises])
    shares = torch.nan_to_num(shares.clamp_min_(0.0), 0.0, 0.0, 0.0)  # 0 / 0 where nothing was moved
    noise.mul_(scale)
    for part, share in zip(torch.split(noise, sizes), shares.mul_(PART), strict=True):
        part.mul_(share)
    copy_all(firsts, torch.split(first.sub_(noise), sizes))


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
