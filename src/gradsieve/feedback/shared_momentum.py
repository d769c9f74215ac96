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

Shares are measured for each parameter, in pieces of at most CHUNK elements. In pieces of less than FEWEST
nothing is taken out: by chance d would explain much of what all ranks have, of a scalar all of it.

All of this takes an optimizer that steps along p. Others keep tensors under the same names that mean
something else (ADOPT's m is divided already, SOAP's v is in another basis): it is found out by trial. Memory:
n elements (`LocalSteps.common`).
"""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradsieve.feedback.step_length import Trial, kind_of
from gradsieve.feedback.units import flat_view
from gradsieve.torch_names import copy_all, plain_part_of

PART = 0.75
"""c: from 0.6 to 0.8 16 ranks end alike, with 1 higher (ADR 50)."""
LEAST_STEPS = 3
"""Own noise is looked at over so many steps at least: in one step the rounding of the sum is as large as what
was moved."""
FEWEST = 64
"""Elements in which own noise is looked for: of what all ranks have 1 / 64 is taken for it, at most."""
CHUNK, LARGE_CHUNK = 1 << 16, 1 << 22
"""Elements that are looked at together: on a processor as many as stay in its cache from the first pass to
the last, on an accelerator more, where what counts is launches."""
_FIRST, _SECOND = "exp_avg", "exp_avg_sq"
_TRIAL_STEPS, _TRIED = 12, 64
"""RAdam divides by nothing in its first five. And elements of a trial, of gradients from 1 to 1,000."""
_ALONG = 0.99
"""Least cosine of a step and where its moments lead."""

Noise = tuple[list[tuple[str, slice]], Tensor]
"""Pieces of parameters (name and place in it), and their own noise end to end."""


def has_moments(optimizer: Any) -> bool:
    """Whether it steps any parameter along Adam's two moments, kept under torch's names."""
    kinds = {_kind_of(group): group for group in optimizer.param_groups if group["params"]}
    return any(steps_along_moments(optimizer, group) for group in kinds.values())


def steps_along_moments(optimizer: Any, group: Mapping[str, Any]) -> bool:
    """By trial, with gradients of unlike sizes: where these are alike, a mean of divided gradients looks like
    a divided mean."""
    eps = group.get("eps", 0.0)
    if not isinstance(eps, int | float) or not _is_floating(group):
        return False
    try:
        with torch.enable_grad():
            return _cosine(optimizer, group, eps) > _ALONG
    except Exception:  # `step_length.py` says so to the user where it matters
        return False


def _kind_of(group: Mapping[str, Any]) -> tuple[Any, ...]:
    return _is_floating(group), *kind_of(group)


def _is_floating(group: Mapping[str, Any]) -> bool:
    return all(each.is_floating_point() for each in group["params"])


def _cosine(optimizer: Any, group: Mapping[str, Any], eps: float) -> float:
    like = max(group["params"], key=lambda each: each.numel())
    shape = (_TRIED, *(4 for _ in range(like.dim() - 1)))
    count, source = math.prod(shape), torch.Generator().manual_seed(0)
    size = (_TRIAL_STEPS + 1, count)
    order, *noises = torch.randn(size, generator=source, dtype=torch.float32, device="cpu")
    sizes = torch.logspace(0, 3, count, dtype=torch.float32, device="cpu")[order.argsort()] * order.sign()
    undecayed = {"weight_decay": 0.0} if "weight_decay" in group else {}
    made_up = torch.ones(shape, dtype=torch.float32, device=like.device)
    trial, before = Trial(optimizer, {**group, **undecayed}, made_up), made_up
    for noise in noises:
        before = trial.parameter.detach().clone()
        trial.step((sizes * (1.0 + 0.1 * noise)).view(shape))
    if (moments := _of(trial.state, trial.parameter.detach())) is None:
        return 0.0
    first, second = (each.double().cpu() for each in moments)
    moved = (before - trial.parameter.detach()).flatten().double().cpu()
    return float(torch.cosine_similarity(moved, first / (second.sqrt() + eps), dim=0))


class Moments:
    """Those of all optimizers that step the parameters of one sync."""

    def __init__(self, held: Mapping[str, Tensor]) -> None:
        """`held`: by name, what the optimizers have."""
        self._held = held
        self._along: weakref.WeakKeyDictionary[Any, dict[Any, bool]] = weakref.WeakKeyDictionary()

    def take_out(self, optimizer: Any, noise: Iterable[Noise]) -> None:
        """Own noise of parameters that the optimizer is about to step."""
        groups = [group for group in optimizer.param_groups if self._steps_along(optimizer, group)]
        eps = {id(each): float(group.get("eps", 0.0)) for group in groups for each in group["params"]}
        known: dict[str, tuple[Tensor, Tensor] | None] = {}
        for pieces, own in noise:
            alike: defaultdict[float, list[tuple[Tensor, Tensor, Tensor]]] = defaultdict(list)
            parts = torch.split(own, [here.stop - here.start for _, here in pieces])
            for (name, here), part in zip(pieces, parts, strict=True):
                parameter = self._held[name]
                if part.numel() < FEWEST or id(parameter) not in eps:
                    continue
                if name not in known:
                    known[name] = _of(optimizer.state.get(parameter, {}), plain_part_of(parameter.detach()))
                if (moments := known[name]) is not None:
                    first, second = moments
                    alike[eps[id(parameter)]].append((first[here], second[here], part))
            for size, together in alike.items():
                take_out(together, size)

    def _steps_along(self, optimizer: Any, group: Mapping[str, Any]) -> bool:
        """Tried out when it is first asked for."""
        if not group["params"]:
            return False
        known = self._along.setdefault(optimizer, {})
        if (key := _kind_of(group)) not in known:
            known[key] = steps_along_moments(optimizer, group)
        return known[key]


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
