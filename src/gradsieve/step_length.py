"""Steps as long as the mean gradient's, and momentum without a rank's own noise, where every rank steps its
own model.

**Length.** Adam divides by the root of the mean square of its gradients. A rank's own gradient has the noise
of its batch in it, which the mean over ranks, that a dense training would divide by, has not:

    rho = |mean g|^2 / mean over ranks of |g_r|^2        1/P where noise rules, 1 where ranks agree

So the mean of the ranks' steps covers sqrt(rho) of a dense step, also where all of it is exchanged, and such
steps are made f = 1/sqrt(rho) times as long. The optimizer and its settings are not touched: once it has
moved the parameters, what it moved them by is lengthened. Decoupled weight decay divides by nothing, and is
left as it is:

    x = x_before - c x_before + f (x_after - x_before + c x_before),    c = rate * decay

That takes n elements of memory, in the parameters' type. A parameter belongs to one sync, so that its steps
have one owner, however many optimizers, syncs and schedules there are.

**Noise.** What a rank's own batch made it step is averaged away when it is sent, but momentum goes on in that
direction for ten steps more. With many ranks most of a rank's momentum is noise of this kind.

    d   what this rank moved, less what all ranks moved in the mean, since this was last done
    p   where momentum leads, m / (sqrt(v) + eps) with Adam

    m -= c <p, d> / <d, d> d (sqrt(v) + eps)

That is the multiple of d which leaves the least of p: measured, so that no learning rate, number of steps or
decay is in it. The part of p that all ranks have is orthogonal to d, but for chance. c is below 1, since what
all ranks moved was rounded, and that error is in d on all of them. A projection never lengthens p. Only
optimizers that step along p are served (`optimizers.py`): under the same names others keep something else.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradsieve.models import Noise
from gradsieve.optimizers import Traits, follow, moments_in, traits_of
from gradsieve.torch_names import copy_all, lerp_all, plain_part_of, scale_all

# c: from 0.6 to 0.8 16 ranks end alike, with 1 higher (ADR 50).
PART = 0.75
# Elements of a piece in which own noise is measured, at least. In a few, chance would take much of what all
# ranks have for noise, of a scalar all of it; in 64 it is 1/64.
FEWEST = 64


@dataclass(frozen=True, slots=True)
class Lengthened:
    """Parameters of one group, as they were before the step that is being taken."""

    group: Mapping[str, Any]
    traits: Traits
    factor: float
    own: list[Tensor]
    before: list[Tensor]


class StepLength:
    """Longer steps and less noise, for the optimizers of one sync."""

    def __init__(self, own: Mapping[str, Tensor], held: Mapping[str, Tensor]) -> None:
        """Both by name: `own`, flat, the memory in which optimizers find the parameters; `held`, the
        parameters as optimizers have them."""
        self._own, self._held = own, held
        self._names = {id(parameter): name for name, parameter in held.items()}
        self._before: dict[str, Tensor] = {}
        self._lengthened: list[Lengthened] = []

    def before(
        self, optimizer: Any, names: Set[str], noise: Iterable[Noise], rho: float, size: float
    ) -> None:
        """The optimizer is about to step the parameters of these names, by gradients of this root mean square
        (0: not known)."""
        self._lengthened = []
        for group in optimizer.param_groups:
            for key in traits_of(optimizer, group).copies:
                for parameter in group["params"]:
                    follow(optimizer.state.get(parameter, {}).get(key), parameter.detach())
        self.take_out(optimizer, noise)
        if rho >= 1.0 or _is_called_off(optimizer):
            return
        for group in optimizer.param_groups:
            stepped = [name for name in self.names_in(group) if name in names]
            traits = traits_of(optimizer, group, size) if stepped else Traits()
            if (factor := traits.factor(rho)) != 1.0:
                own = [self._own[name] for name in stepped]
                before = [self._memory_for(name) for name in stepped]
                copy_all(before, own)
                self._lengthened.append(Lengthened(group, traits, factor, own, before))

    def after(self) -> None:
        for each in self._lengthened:
            if each.traits.decays_apart:
                scale_all(each.before, 1.0 - float(each.group["lr"]) * float(each.group["weight_decay"]))
            lerp_all(each.own, each.before, 1.0 - each.factor)
        self._lengthened = []

    def names_in(self, group: Mapping[str, Any]) -> list[str]:
        return [self._names[id(each)] for each in group["params"] if id(each) in self._names]

    def _memory_for(self, name: str) -> Tensor:
        if name not in self._before:
            self._before[name] = torch.empty_like(self._own[name])
        return self._before[name]

    def take_out(self, optimizer: Any, noise: Iterable[Noise]) -> None:
        """Take own noise out of the momentum of the parameters in which it was found."""
        groups = [group for group in optimizer.param_groups if traits_of(optimizer, group).has_moments]
        eps = {id(each): float(group.get("eps", 0.0)) for group in groups for each in group["params"]}
        known: dict[str, tuple[Tensor, Tensor] | None] = {}
        for pieces, own in noise:
            by_eps: defaultdict[float, list[tuple[Tensor, Tensor, Tensor]]] = defaultdict(list)
            parts = torch.split(own, [here.stop - here.start for _, here in pieces])
            for (name, here), part in zip(pieces, parts, strict=True):
                parameter = self._held[name]
                if part.numel() < FEWEST or id(parameter) not in eps:
                    continue
                if name not in known:
                    like = plain_part_of(parameter.detach())
                    known[name] = moments_in(optimizer.state.get(parameter, {}), like)
                if (moments := known[name]) is not None:
                    first, second = moments
                    by_eps[eps[id(parameter)]].append((first[here], second[here], part))
            for each, together in by_eps.items():
                take_out(together, each)


def take_out(pieces: Sequence[tuple[Tensor, Tensor, Tensor]], eps: float) -> None:
    """Take own noise out of pieces with both moments, by a share for each piece. On an accelerator most
    launches are for all of them."""
    firsts, seconds, noises = zip(*pieces, strict=True)
    sizes = [each.numel() for each in noises]
    noise = torch.cat(noises)
    scale = torch.cat(seconds).to(noise.dtype).sqrt_().add_(eps)
    first = torch.cat(firsts).to(noise.dtype)
    leads = torch.split(first / scale, sizes)
    shares = torch.stack([torch.dot(*pair) for pair in zip(leads, noises, strict=True)])
    shares /= torch.stack([torch.dot(own, own) for own in noises])
    shares = torch.nan_to_num(shares.clamp_min_(0.0), 0.0, 0.0, 0.0)  # 0 / 0 where nothing was moved
    # A gradient of 1e20 makes v infinite: Adam moves such an element no more, and its m stays as it is.
    noise.mul_(scale).nan_to_num_(0.0, 0.0, 0.0)
    for part, share in zip(torch.split(noise, sizes), shares.mul_(PART), strict=True):
        part.mul_(share)
    copy_all(firsts, torch.split(first.sub_(noise), sizes))


def _is_called_off(optimizer: Any) -> bool:
    """Whether a fused optimizer will not step: its GradScaler has found an overflow."""
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found)
