"""What an option was measured to cost in quality. Nothing here is a prediction: what is not here was not
measured.

`above` is the loss above dense's of the transformer of `docs/studies/`, in per cent, 4 ranks, AdamW; the only
figure in which all options can be compared. `steps` are those until dense's final loss, times dense's, of the
transformer of `bench time-to-accuracy`, 4 ranks, one seed. Files in `benchmarks/results/`:

    accuracy-bits-transformer-2026-11-15.json   budgets in bits, 2,000 steps, 3 seeds
    accuracy-published-400-2026-11-16.json      schemes at density 0.01, 400 steps, one seed
    accuracy-oktopk-transformer-400-2026-11-18.json   oktopk-paper as released; dense as in the file above
    accuracy-2026-11-15.json                    ExDyna at 0.001, 2,000 steps, one seed, before ADR 19
    accuracy-equal-bytes-0.75-2026-11-16.json   local SGD, 400 steps, 3 seeds
    accuracy-internet-2026-11-16.json           every=3, overlap=3: loss 2.562 after 300 steps, 8 ranks, one
    accuracy-internet-dense-2026-11-17.json     seed; dense 2.311, and 2.456 with 0.15 bits every step
    accuracy-internet-0.15-2026-11-17.json
    accuracy-equal-bytes-16-2026-11-16.json     0.75 bits with 16 ranks, 400 steps, one seed
    time-to-accuracy-transformer-100mbit-2026-11-15.json        steps: 150 of dense, 150 of fp16, 235 of auto
                                                                with 0.157 bits, 205 of ExDyna at 0.01
    time-to-accuracy-transformer-100mbit-20ms-2026-11-17.json   150 of dense, 180 of 0.75 bits, 200 of 0.15,
                                                                220 of every=3, overlap=3
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Gap:
    above: float | None
    """Per cent; None: not measured in this figure."""
    said: str
    steps: float | None = None
    """Until dense's loss, times dense's; None: not measured, or never there in twice as many."""

    def __str__(self) -> str:
        return self.said


NONE = Gap(0.0, "0", 1.0)
UNKNOWN = Gap(None, "not measured")
FP16 = Gap(0.1, "none seen (one seed)", 1.0)
BETWEEN_SITES = Gap(10.9, "10.9 % (one seed, 300 steps; 0.15 bits there: 6.3 %)", 220 / 150)
POWERSGD = Gap(None, "CNN 0.7 points (one seed); loss not measured")
NEAR_FOUR = 8
"""Ranks up to which what four have shown is taken to hold."""
WITH_SIXTEEN = 10.4
"""`above`, of 0.75 bits, 400 steps, in all as large a batch as four ranks had."""
_DENSITY = 0.01
_MEASURED_BITS = ((0.15, 3.59, 200 / 150), (0.75, 1.70, 180 / 150))
"""Of stripes: bits, `above` (± 0.45 and 0.35), and steps."""
_AUTO_STEPS, _EXDYNA_STEPS = 235 / 150, 205 / 150
"""The first with all that a budget tries before it is found."""
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
    """On what, and with how many ranks: a sentence for whoever has other ones."""
    said = "Steps needed and loss were measured on small transformers of ours with 4 ranks"
    if ranks <= NEAR_FOUR:
        return f"{said}."
    said += (
        f". With 16, which had a quarter of that batch each, 0.75 bits ended {WITH_SIXTEEN:g} % above dense "
        "(one seed)."
    )
    return said if ranks == 16 else f"{said} Nothing was measured with {ranks}."


def of_bits(bits: float) -> Gap:
    """Between two budgets that were measured, between their gaps; below the smaller one nothing is known."""
    (low, worst, most_steps), (high, best, least_steps) = _MEASURED_BITS
    if bits < low:
        return Gap(None, f"below {low:g} bits not measured")
    part = min(1.0, math.log(bits / low) / math.log(high / low))
    above = worst + part * (best - worst)
    said = f"{above:.1f} % (3 seeds)" if part in (0.0, 1.0) else f"about {above:.1f} %"
    return Gap(above, said, most_steps + part * (least_steps - most_steps))


def of_auto(bits: float) -> Gap:
    """Of a budget that is found while training runs."""
    gap = of_bits(bits)
    return gap if gap.steps is None else replace(gap, steps=_AUTO_STEPS)


def of_scheme(name: str, density: float, exact: bool) -> Gap:
    """Of values as they are; a scheme with rounded ones was not trained."""
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
