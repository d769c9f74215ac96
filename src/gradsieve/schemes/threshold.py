"""One threshold for the whole model that keeps the count at k, from what all ranks saw above it.

A controller: the count's error times Hill's estimate of the tail says how far the threshold is from where it
should be; most of that is made good at once, and what remains from step to step is learnt as a drift.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

# What chose these: docs/adr/0004-threshold-control.md, by the name of the section.
# Share of the estimated correction applied at once, and added to the threshold's drift per step. Residuals
# grow and drain, so that a constant count often needs a threshold that keeps moving (and less so with time:
# what fills up linearly grows by 1/t). "Tried and dropped": the first alone is off by -64 to +27 %.
PROPORTIONAL, INTEGRAL = 0.8, 0.3
# Error of ln(count) beyond which the whole correction is applied. No measurement chose this value.
JUMP_ERROR = 0.7
# Errors teach the drift as much as one of this size at most; beyond, it is a jump and not a trend. "Drift":
# without it the drift winds up in the first steps and overshoots for dozens.
MAX_LESSON = 0.25
# Part of both gains that is applied to small errors, and the error from which on it is all of them. Small
# ones are chance, which differs from batch to batch: to answer it in full would double it. "In trainings it
# answered chance": the count swung by 14 and 25 % from step to step, and a quarter of the rows overflowed;
# now a tenth of them do.
NOISE_GAIN, TREND_ERROR = 0.4, 0.5
# Mean of ln(|x| / threshold) from which on a lower threshold has nothing left to find. No measurement chose
# this value.
EMPTY_BELOW = 3.0
# Weight of the past in a bucket's share of k. No measurement chose this value.
SHARE_MEMORY = 0.5
# Of the demand, for which it is known what would have been sent.
FACTORS = [2.0 ** (place / 8) for place in range(-24, 25)]


@dataclass(frozen=True, kw_only=True)
class Partitioned:
    """The state of one bucket is the same on every rank."""

    n: int
    # Of the whole model. 0: none known, the next step locks.
    threshold: float
    # Change of ln(threshold) per step that keeps the count, learnt so far.
    drift: float = 0.0
    # Steps since the threshold was found.
    tracked: int = 0
    # How many of the model's k elements are expected from this bucket.
    share: float
    # Elements that would have been sent in the last step, had the demand been each of FACTORS as large.
    curve: Tensor
    demand: float = 0.0
    # The statistic of the last step (`exclusive.py`), summed over the bucket's partitions.
    tail: float = 0.0
    sent: int = 0
    # The papers' f(t): the longest selection over the mean, before any row is cut.
    imbalance: float = 1.0
    # Elements in the longest row of the last step: what the cost formula's f counts.
    longest: int = 0
    # Share of the rows of the last step into which not all fitted.
    cut: float = 0.0


def no_curve() -> Tensor:
    return torch.zeros(len(FACTORS), dtype=torch.float64, device="cpu")


TINY, HUGE = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max

AnyPartitioned = TypeVar("AnyPartitioned", bound=Partitioned)


def move_threshold(states: Sequence[AnyPartitioned], k: int, control: bool = True) -> list[AnyPartitioned]:
    """Finds one threshold for all buckets, and each bucket's share of k, from what all of them saw."""
    demand = sum(state.demand for state in states)
    sent = sum(state.sent for state in states)
    statistic = sum(state.tail for state in states)
    threshold, drift, tracked = states[0].threshold, states[0].drift, states[0].tracked
    if threshold == 0.0:
        smallest = min(max(statistic / sent, TINY), HUGE) if sent else 0.0
        return [replace(state, threshold=smallest, drift=0.0, tracked=0) for state in states]
    if not sent:
        return [replace(state, threshold=0.0, share=_share(state, demand, k)) for state in states]
    if not control:
        return [replace(state, share=_share(state, demand, k)) for state in states]
    log_excess = statistic / demand
    spread = min(log_excess, 1.0)
    error = _error(torch.stack([state.curve for state in states]).sum(0).tolist(), k)
    trust = max(NOISE_GAIN, min(abs(error) / TREND_ERROR, 1.0))
    gain = 1.0 if abs(error) > JUMP_ERROR else trust * PROPORTIONAL
    lesson = trust * INTEGRAL * min(max(error, -MAX_LESSON), MAX_LESSON)
    drift = drift * tracked / (tracked + 1) + lesson * spread
    move = gain * error * spread + drift
    if error < 0 and log_excess > EMPTY_BELOW:
        move, drift = 0.0, 0.0
    threshold = min(max(threshold * math.exp(move), TINY), HUGE)
    return [
        replace(
            state,
            threshold=threshold,
            drift=drift,
            tracked=tracked + 1,
            share=_share(state, demand, k),
        )
        for state in states
    ]


def _error(curve: Sequence[float], k: int) -> float:
    """Returns by how much the demand is too large, as a logarithm: how much less of it would have sent k.

    Rows hide what goes beyond them, so that the count sent says little about the demand; and where hot spots
    move, some rows overflow while others stay short, so that it takes a demand above k to send k.
    """
    place = bisect_left(curve, k)
    if place == 0:
        return -math.log(FACTORS[0]) + math.log(curve[0] / k)  # no row is cut at so small a demand
    if place == len(curve):
        return -math.log(FACTORS[-1])
    low, high = curve[place - 1], curve[place]
    part = math.log(k / low) / math.log(high / low)
    return -math.log(FACTORS[place - 1]) - part * math.log(FACTORS[place] / FACTORS[place - 1])


def _share(state: Partitioned, demand: float, k: int) -> float:
    now = k * state.demand / demand if demand else state.share
    return SHARE_MEMORY * state.share + (1 - SHARE_MEMORY) * now
