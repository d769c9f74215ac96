"""What an option was measured to cost in quality. Nothing here is a prediction: what is not here was not
measured.

`above` is the loss above dense's of the transformer of `docs/studies/`, in per cent, 4 ranks, AdamW; the only
figure in which all options can be compared. `steps` are those until dense's final loss, times dense's, of the
transformer of `bench time-to-accuracy`, 4 ranks, one seed. Files in `benchmarks/results/`:

    accuracy-ranks-4-2000-2026-11-19.json       budgets in bits, 2,000 steps, 3 seeds
    accuracy-published-400-2026-11-16.json      schemes at density 0.01, 400 steps, one seed
    accuracy-oktopk-transformer-400-2026-11-18.json   oktopk-paper as released; dense as in the file above
    accuracy-2026-11-15.json                    ExDyna at 0.001, 2,000 steps, one seed, before ADR 19
    accuracy-equal-bytes-0.75-2026-11-19.json   local SGD, 400 steps, 3 seeds
    accuracy-internet-2026-11-16.json           every=3, overlap=3: loss 2.562 after 300 steps, 8 ranks, one
    accuracy-internet-dense-2026-11-17.json     seed; dense 2.311, and 2.456 with 0.15 bits every step
    accuracy-internet-0.15-2026-11-17.json
    accuracy-ranks-16-2026-11-19.json           budgets with 16 ranks, 400 steps, 3 seeds
    accuracy-gradients-16-2026-11-18.json       all gradients in 4 bits, likewise
    accuracy-ranks-64-2026-11-19.json           budgets with 64 ranks, 400 steps, one seed
    time-to-accuracy-transformer-100mbit-2026-11-15.json        steps: 150 of dense, 150 of fp16, 235 of auto
                                                                with 0.157 bits, 205 of ExDyna at 0.01
    time-to-accuracy-transformer-100mbit-20ms-2026-11-17.json   150 of dense, 180 of 0.75 bits, 200 of 0.15,
                                                                220 of every=3, overlap=3
    time-to-accuracy-transformer-gradients-1gbit-2026-11-18.json   150 of dense, 155 of gradients in 4 bits
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True, slots=True)
class Gap:
    above: float | None  # per cent; None: not measured in this figure
    said: str
    # Until dense's loss, times dense's; None: not measured, or never there in twice as many
    steps: float | None = None

    def __str__(self) -> str:
        return self.said


NONE = Gap(0.0, "0", 1.0)
UNKNOWN = Gap(None, "not measured")
FP16 = Gap(0.1, "none seen (one seed)", 1.0)
BETWEEN_SITES = Gap(10.9, "10.9 % (one seed, 300 steps; 0.15 bits there: 6.3 %)", 220 / 150)
POWERSGD = Gap(None, "CNN 0.7 points (one seed); loss not measured")
GRADIENTS_IN_FOUR_BITS = Gap(0.47, "0.5 % (3 seeds, 16 ranks)", 155 / 150)
# Of stripes, by the ranks that were measured and by bits: `above` and seeds. Four after 2,000 steps, the
# others after 400 steps of 4,096 tokens in all.
BY_RANKS: dict[int, dict[float, tuple[float, int]]] = {
    4: {0.15: (3.07, 3), 0.75: (-0.01, 3), 4.0: (0.29, 3), 8.0: (0.19, 3)},
    16: {0.75: (8.9, 3), 2.0: (2.7, 3), 4.0: (0.5, 3), 8.0: (1.4, 3)},
    64: {0.75: (20.6, 1), 8.0: (5.1, 1)},
}
_TOKENS = 4096
_NEAR_FOUR = 8  # ranks up to which the figures of four are used
# Of stripes with four ranks: bits, and steps. With more they were not counted.
_STEPS = {0.15: 200 / 150, 0.75: 180 / 150}
_SEEDS = {1: "one seed", 3: "3 seeds"}
_DENSITY = 0.01
_AUTO_STEPS, _EXDYNA_STEPS = 235 / 150, 205 / 150  # the first with all that a budget tries before it is found
_SCHEMES = {
    "exdyna": 6.8,
    "deft": 6.7,
    "oktopk": 6.8,
    "spardl": 6.4,
    "topk": 2.4,
    "randomk": 9.7,
}
_PUBLISHED = {
    "exdyna-paper": 16.9,
    "deft-paper": 25.3,
    "oktopk-paper": 25.8,
    "spardl-paper": 24.8,
}
_EXDYNA_AT_A_THOUSANDTH = 14.5


def measured_with(ranks: int) -> str:
    said = "Steps needed and loss were measured on small transformers of ours with 4 ranks"
    if (near := _measured_near(ranks)) == 4:
        return f"{said}."
    said += f"; the loss of budgets with {near}, which had {_TOKENS // near} tokens each"
    return f"{said}." if ranks <= near else f"{said}. Nothing was measured with {ranks}."


def _measured_near(ranks: int) -> int:
    """Return the fewest measured ranks that are not clearly fewer than these, or the most."""
    return next((near for near in BY_RANKS if ranks <= max(near, _NEAR_FOUR)), max(BY_RANKS))


def of_bits(bits: float, ranks: int) -> Gap:
    """Interpolate between measured budgets; fewer bits that ended lower by chance count as more."""
    near = _measured_near(ranks)
    measured = BY_RANKS[near]
    if bits < (least := min(measured)):
        return Gap(None, f"below {least:g} bits not measured")
    gaps = {each: max(gap for more, (gap, _) in measured.items() if more >= each) for each in measured}
    above = _between(gaps, bits)
    words = f"{above:.1f} %" if bits in measured else f"about {above:.1f} %"
    known = [_SEEDS[measured[bits][1]]] if bits in measured else []
    known += [] if near == 4 else [f"{near} ranks"]
    steps = _between(_STEPS, bits) if near == 4 else None
    return Gap(above, f"{words} ({', '.join(known)})" if known else words, steps)


def _between(measured: Mapping[float, float], bits: float) -> float:
    """Along lines over the logarithm of bits; beyond the ends as at the ends."""
    return float(np.interp(math.log(bits), [math.log(known) for known in measured], list(measured.values())))


def of_auto(bits: float, ranks: int) -> Gap:
    gap = of_bits(bits, ranks)
    return gap if gap.steps is None else replace(gap, steps=_AUTO_STEPS)


def of_scheme(name: str, density: float, exact: bool) -> Gap:
    if not exact:
        return UNKNOWN
    if density == _DENSITY and name in (known := _SCHEMES | _PUBLISHED):
        steps = _EXDYNA_STEPS if name == "exdyna" else None
        return Gap(known[name], f"{known[name]:g} % (one seed)", steps)
    if name == "exdyna" and density == 0.001:
        return Gap(_EXDYNA_AT_A_THOUSANDTH, f"{_EXDYNA_AT_A_THOUSANDTH:g} % (one seed)")
    return UNKNOWN


def of_local_steps(every: int) -> Gap:
    if every == 76:
        return Gap(16.7, "16.7 % (3 seeds)")
    return UNKNOWN
