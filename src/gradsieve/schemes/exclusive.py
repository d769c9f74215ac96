"""What MiCRO and ExDyna share: exclusive partitions, one threshold, two collectives.

Every element belongs to one partition, every partition to one rank for this step. The owner alone decides
which of its elements travel, so no two ranks pick the same index and nothing builds up.

The index message of a rank is one row of fixed length, known to all before it is sent:

    [ demand | tail | index 0 | index 1 | ... | padding ]

`demand` is how many elements were above the threshold, also those that did not fit (they are not spent and
stay in the residual). `tail` is one float that tells where the threshold should go:

    tracking   sum of ln(|x| / threshold) over the demand. Divided by the demand it is Hill's estimate of
               1/a for a tail that falls as x^-a, so count -> k needs threshold *= (count / k)^(1/a).
    locking    no usable threshold: each owner sends its exact largest elements, as many as its quota, and
               `tail` is count * smallest of them; the threshold becomes the mean of the smallest.

Both sums are linear, so that they add up over ranks and over buckets to one threshold for the whole model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from gradsieve.comm.ops import AllGather
from gradsieve.kernels import above, largest
from gradsieve.schemes.base import Scheme, log2_ceil
from gradsieve.types import Ctx, Program
from gradsieve.wire.check import counts_within, strictly_increasing, tails_within
from gradsieve.wire.frame import from_bits, index_dtype, to_bits

HEADER = 2
SLACK = 1.125
"""Room in a row over the expected count; what does not fit waits one step."""
PROPORTIONAL, INTEGRAL = 0.8, 0.3
"""Share of the estimated correction applied at once, and added to the threshold's drift per step. Residuals
grow and drain, so that a constant count often needs a threshold that keeps moving (and less so with time:
what fills up linearly grows by 1/t)."""
FAR = 0.7
"""Error of ln(count) beyond which the whole correction is applied."""
SURPRISE = 0.25
"""Errors teach the drift as much as one of this size at most; beyond, it is a jump and not a trend."""
SATURATED = 3.0
"""Mean of ln(|x| / threshold) from which on a lower threshold has nothing left to find."""
SHARE_MEMORY = 0.5
"""Weight of the past in a bucket's share of k."""


@dataclass(frozen=True, kw_only=True)
class Partitioned:
    """State of one bucket, the same on every rank."""

    n: int
    threshold: float
    """Of the whole model. 0: none known, the next step locks."""
    drift: float = 0.0
    """Change of ln(threshold) per step that keeps the count, learnt so far."""
    tracked: int = 0
    """Steps since the threshold was found."""
    share: float
    """How many of the model's k elements are expected from this bucket."""
    demand: float = 0.0
    tail: float = 0.0
    sent: int = 0
    imbalance: float = 1.0
    """Longest row over the mean row of the last step: the f of the cost formula."""


_TINY, _HUGE = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max

AnyPartitioned = TypeVar("AnyPartitioned", bound=Partitioned)


@dataclass(frozen=True, kw_only=True)
class Exclusive(Scheme[AnyPartitioned]):
    """A scheme of exclusive partitions: one threshold for the model, about three words an element."""

    control: bool = True
    """False, for ablation: the threshold stays as it was found, and is found anew when it selects nothing."""

    def settle(self, states: Sequence[AnyPartitioned]) -> list[AnyPartitioned]:
        return settle_threshold(states, self.k(sum(state.n for state in states)), self.control)

    def report(self, state: AnyPartitioned) -> Mapping[str, float]:
        return {"threshold": state.threshold, "imbalance": state.imbalance}

    def expected_words(self, n: int, world: int, state: AnyPartitioned | None = None) -> float:
        imbalance, sent = (state.imbalance, state.sent) if state else (1.0, self.k(n))
        return sent * (imbalance + 2.0) * (world - 1) / world

    def expected_rounds(self, n: int, world: int, state: AnyPartitioned | None = None) -> int:
        """As published; ours are 3 log P, since counts travel with the indices."""
        return 4 * log2_ceil(world)


@dataclass(frozen=True, slots=True)
class Gathered:
    """What every rank knows after the index gather, in partition order."""

    picked: Tensor
    """All indices, sorted."""
    sent: Tensor
    """Indices from each partition."""
    demand: Tensor
    """Elements above the threshold in each partition."""
    tail: Tensor


def gather_selected(
    acc: Tensor, cuts: Tensor, quotas: Tensor, capacity: int, threshold: float, ctx: Ctx
) -> Program[Gathered]:
    """Select in this rank's partition, gather the rows of all ranks, put them in partition order."""
    n, world = acc.numel(), ctx.world
    part = (ctx.step + ctx.rank) % world
    start, stop = int(cuts[part]), int(cuts[part + 1])
    selected, demand, tail = _select(acc[start:stop], threshold, int(quotas[part]), capacity)
    row = torch.zeros(HEADER + capacity, dtype=index_dtype(n), device=acc.device)
    row[0] = demand
    row[1] = to_bits(tail)
    row[HEADER : HEADER + selected.numel()] = selected + start
    rows = yield AllGather(row)

    counts_within(rows[:, 0], n, f"elements in step {ctx.step}")
    tails_within(from_bits(rows[:, 1], torch.float32), f"in step {ctx.step}")
    rows = rows.roll(ctx.step % world, 0)  # partition p was with rank (p - step) mod P
    demands = rows[:, 0].long()
    sent = demands.clamp(max=capacity)
    filled = torch.arange(capacity, device=acc.device) < sent[:, None]
    picked = rows[:, HEADER:][filled].long()
    strictly_increasing(picked, n, f"indices gathered in step {ctx.step}")
    return Gathered(picked, sent, demands, from_bits(rows[:, 1], torch.float32).double())


def _select(x: Tensor, threshold: float, quota: int, capacity: int) -> tuple[Tensor, int, Tensor]:
    """Indices to send, how many were wanted, and the tail sum."""
    if threshold == 0.0:
        selected = largest(x, min(quota, capacity))
        smallest = x[selected].abs().min() if selected.numel() else x.new_zeros(())
        return selected, selected.numel(), _sendable(selected.numel() * smallest)
    selected = above(x, threshold)
    magnitude = x[selected].abs()
    tail = _sendable((magnitude / threshold).log().sum())
    demand = selected.numel()
    if demand > capacity:
        selected = selected[largest(magnitude, capacity)]
    return selected, demand, tail


def _sendable(tail: Tensor) -> Tensor:
    """As a finite float32, whatever strange values were in the gradient."""
    return tail.nan_to_num(nan=_HUGE).clamp(0.0, _HUGE).float()


def absorb(state: AnyPartitioned, gathered: Gathered) -> AnyPartitioned:
    """The bucket's figures of this step, for `settle`."""
    sent = int(gathered.sent.sum())
    mean = sent / gathered.sent.numel()
    return replace(
        state,
        demand=float(gathered.demand.sum()),
        tail=float(gathered.tail.sum()),
        sent=sent,
        imbalance=float(gathered.sent.max()) / mean if sent else 1.0,
    )


def settle_threshold(states: Sequence[AnyPartitioned], k: int, control: bool = True) -> list[AnyPartitioned]:
    """One threshold for all buckets, and each bucket's share of k, from what all of them saw."""
    demand = sum(state.demand for state in states)
    sent = sum(state.sent for state in states)
    tail = sum(state.tail for state in states)
    threshold, drift, tracked = states[0].threshold, states[0].drift, states[0].tracked
    if threshold == 0.0:
        found = min(max(tail / sent, _TINY), _HUGE) if sent else 0.0
        return [replace(state, threshold=found, drift=0.0, tracked=0) for state in states]
    if not sent:
        return [replace(state, threshold=0.0, share=_share(state, demand, k)) for state in states]
    if not control:
        return [replace(state, share=_share(state, demand, k)) for state in states]
    spread = min(tail / demand, 1.0)
    error = math.log(_ratio(sent, demand, k))
    gain = 1.0 if abs(error) > FAR else PROPORTIONAL
    drift = drift * tracked / (tracked + 1) + INTEGRAL * min(max(error, -SURPRISE), SURPRISE) * spread
    move = gain * error * spread + drift
    if error < 0 and tail / demand > SATURATED:
        move, drift = 0.0, 0.0
    threshold = min(max(threshold * math.exp(move), _TINY), _HUGE)
    return [
        replace(state, threshold=threshold, drift=drift, tracked=tracked + 1, share=_share(state, demand, k))
        for state in states
    ]


def _ratio(sent: int, demand: float, k: int) -> float:
    """Count over target. The count is what was sent, also where rows cut a good deal off: other partitions
    must then send more. Rows hide what goes far beyond, so there it is what was demanded."""
    weight = min(max((demand / k - 4.0) / 4.0, 0.0), 1.0)
    return float(sent / k * (demand / sent) ** weight)


def _share(state: Partitioned, demand: float, k: int) -> float:
    now = k * state.demand / demand if demand else state.share
    return SHARE_MEMORY * state.share + (1 - SHARE_MEMORY) * now
