"""What to change, by rules: each looks at one figure of a recording, and says nothing where it is not there.

A rule gives the figure it saw, the limit, and what to do beyond it. Figures are medians over ranks and over
all steps but the first fifth.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from gradsieve_tools.report.gathered import Training
from gradsieve_tools.stages import WAITING

# shares of a step: the wait for the exchange, one not worth a word, an exchange with time to spare
WAITED, HIDDEN, IDLE_LINK = 0.15, 0.02, 0.4
UNEVEN, CUT, OFF_TARGET = 1.5, 0.25, 0.25  # ExDyna's rows are as long as leaves 0.15 of them cut
STALE = 1000.0  # steps beyond which trainings ended visibly worse
DENSE_STEPS, LATE_STEPS, LATE_COST = 0.5, 0.5, 0.1


@dataclass(frozen=True, slots=True)
class Finding:
    rule: str
    figure: str | None  # None: the recording does not have it
    limit: str
    change: str | None = None  # None: within the limit


def findings(training: Training) -> list[Finding]:
    return [rule(training) for rule in _RULES]


def _waiting(training: Training) -> Finding:
    rule, limit = "training waits for the exchange", f"{WAITED:.0%} of a step"
    share = _share_of_step(training, training.stages.get(WAITING))
    if share is None:
        return Finding(rule, None, limit)
    return Finding(rule, f"{share:.0%} of a step", limit, _shorter(training) if share > WAITED else None)


def _shorter(training: Training) -> str:
    """Return what the exchange takes longest for."""
    own = {
        name: training.median(values) or 0.0 for name, values in training.stages.items() if name != WAITING
    }
    longest = max(own, key=lambda name: own[name])
    if longest != "exchange":
        seen = f"Of its stages {longest} takes longest, {1e3 * own[longest]:.3g} ms. "
        return seen + "See what is said of finding and sending; or exchange less often (every=)."
    seen = f"Most of it are collectives, {1e3 * own[longest]:.3g} ms. "
    waited = training.median(training.waits)
    if waited is not None and waited > own[longest] / 2:
        return seen + f"For {1e3 * waited:.3g} ms of it ranks wait for the last one: see below who that is."
    less = {
        "auto": "Gradsieve sends as little as it can already: exchange less often (every=).",
        "fixed": "Send less (a lower bits=, or leave it out), or exchange less often (every=).",
        "density": "Send less (a lower density=, or bits= instead of it), or exchange less often (every=).",
    }
    return seen + less[_kind(training)]


def _room(training: Training) -> Finding:
    rule, limit = "capacity for more", f"exchange under {IDLE_LINK:.0%} of a step and no rank waiting"
    waited = _share_of_step(training, training.stages.get(WAITING))
    busy = _share_of_step(training, training.engine_seconds)
    if waited is None or busy is None or training.header.density == 1.0:
        return Finding(rule, None, limit)
    change = None
    kind = _kind(training)
    if waited < HIDDEN and busy < IDLE_LINK and kind != "auto":  # which sends more by itself, where it can
        change = "More could be sent without a wait. " + (
            f"Raise bits= (it is {training.header.budget}), or leave it out and let gradsieve fill the time."
            if kind == "fixed"
            else "Raise density=, or give neither density nor scheme and let gradsieve fill the time."
        )
    return Finding(rule, f"exchange {busy:.0%} of a step, a wait of {waited:.0%}", limit, change)


def _selection(training: Training) -> Finding:
    rule, limit = "finding costs more than sending", "the seconds in collectives"
    stages = training.stages
    own = [
        stages[name] for name in ("select", "partition", "threshold", "encode", "decode") if name in stages
    ]
    sending = training.median(stages["exchange"]) if "exchange" in stages else None
    if not own or sending is None or training.is_virtual:
        return Finding(rule, None, limit)
    finding = training.median(np.sum(own, axis=0)) or 0.0
    change = None
    if finding > sending:
        change = "Use the compiled kernels, if they are not in use (pip install 'gradsieve[cpu]')"
        change += (
            "." if _is(training, "stripes") else ", or a scheme without selection (stripes, the default)."
        )
    return Finding(
        rule, f"{1e3 * finding:.3g} ms against {1e3 * sending:.3g} ms in collectives", limit, change
    )


def _imbalance(training: Training) -> Finding:
    rule, limit = "uneven selections, f(t)", f"{UNEVEN:g}"
    value = training.median(training.columns["imbalance"])
    change = None
    if value is not None and value > UNEVEN:
        change = "All ranks wait for the longest selection: choose a scheme that selects nothing (stripes)"
        change += "." if _is(training, "exdyna") else ", or one that balances them (exdyna)."
    return Finding(rule, None if value is None else f"{value:.2f}", limit, change)


def _cut(training: Training) -> Finding:
    rule, limit = "rows cut", f"{CUT:.0%} of the ranks"
    known = training.steady(training.columns["cut"])
    value = float(known.mean()) if len(known) else None
    change = None
    if value is not None and value > CUT:
        change = "Ranks select more than their rows hold: a higher density= has longer rows"
        change += "." if _is(training, "exdyna") else ", a scheme that balances (exdyna) fills them evenly."
    return Finding(rule, None if value is None else f"{value:.1%} of the ranks", limit, change)


def _off_target(training: Training) -> Finding:
    rule, limit = "density is what was asked for", f"within {OFF_TARGET:.0%}"
    target, value = training.header.density, training.median(training.columns["density"])
    if value is None or target >= 1.0 or _is(training, "stripes"):  # stripes may have a budget instead
        return Finding(rule, None, limit)
    change = None
    if value > (1 + OFF_TARGET) * target and value < 1.0:
        change = (
            "More is in the update than was asked for: ranks choose on their own and their choices add up "
            "(topk), or a threshold does not hold. exdyna and stripes divide the elements among the ranks."
        )
    elif value < (1 - OFF_TARGET) * target:
        change = "Less is sent than was asked for: the threshold has not converged, or rows are cut."
    return Finding(rule, f"{value:.3g} for a target of {target:g}", limit, change)


def _age(training: Training) -> Finding:
    rule, limit = "age of the residual", f"{STALE:,.0f} steps"
    value = training.median(training.columns["age"])
    change = None
    if value is not None and value > STALE:
        what = {"auto": "give bits=", "fixed": "raise bits=", "density": "raise density="}[_kind(training)]
        more = "" if what == "give bits=" else f" about {2 * value / STALE:.0f} times"
        change = f"What is sent is old: {what}{more}."
    return Finding(rule, None if value is None else f"{value:,.0f} steps", limit, change)


def _dense(training: Training) -> Finding:
    rule, limit = "steps that went dense", f"{DENSE_STEPS:.0%} of the steps"
    known = np.isfinite(training.columns["density"])
    dense = training.steady(np.where(known, training.is_dense, np.nan))
    if (training.header.density >= 1.0 and not training.header.budget) or not len(dense):
        return Finding(rule, None, limit)
    share = float(dense.mean())
    change = None
    if share > DENSE_STEPS:
        plain = "train with plain DistributedDataParallel on this network."
        change = {
            "auto": f"Everything was sent as it is, and hid: {plain}",
            "fixed": f"bits={training.header.budget} sends everything as it is: give less, or {plain}",
            "density": f"Dense was faster here by itself: {plain}",
        }[_kind(training)]
    return Finding(rule, f"{share:.0%} of the steps", limit, change)


def _straggler(training: Training) -> Finding:
    rule = "the others wait for one rank"
    limit = f"last in {LATE_STEPS:.0%} of the steps, at {LATE_COST:.0%} of a step"
    last = training.last
    if len(last) < 10:
        return Finding(rule, None, limit)
    counts = np.bincount(last, minlength=len(training.ranks)) / len(last)
    row = int(counts.argmax())
    others = np.delete(training.waits, row, axis=0)
    cost = _share_of_step(training, others, training.step_seconds[np.arange(len(training.ranks)) != row])
    if cost is None:
        return Finding(rule, None, limit)
    rank, change = training.ranks[row], None
    if counts[row] > LATE_STEPS and cost > LATE_COST:
        change = f"Look at rank {rank}: its input, its processor, its link, what else runs on its host."
    figure = f"rank {rank} last in {counts[row]:.0%} of the steps, others wait {cost:.0%} of a step"
    return Finding(rule, figure, limit, change)


def _kind(training: Training) -> str:
    """Return what says how much is sent: a budget that is found or fixed, or a density."""
    budget = training.header.budget
    return {"": "density", "auto": "auto"}.get(budget, "fixed")


def _is(training: Training, scheme: str) -> bool:
    return training.header.scheme.partition(":")[0] == scheme


def _share_of_step(
    training: Training, seconds: np.ndarray | None, step: np.ndarray | None = None
) -> float | None:
    """Medians of both: a step in which something else ran is no step."""
    whole = training.median(training.step_seconds if step is None else step)
    part = None if seconds is None else training.median(seconds)
    if training.is_virtual or whole is None or part is None or whole <= 0:
        return None
    return part / whole


_RULES: list[Callable[[Training], Finding]] = [
    _waiting, _room, _selection, _straggler, _imbalance, _cut, _off_target, _age, _dense,
]  # fmt: skip
