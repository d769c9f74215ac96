"""The ranking, the recommendation, and why not the others.

Recommended is the option with the smallest measured loss among those that cannot be distinguished from the
quickest: whose predicted step is at most MARGIN longer than that of the quickest whose loss is acceptable.
Dense has none, so that plain DDP is the answer wherever it is that near.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradsieve.pipeline.costs import Costs
from gradsieve.tools.plan.options import Model, Option, dense, every_option
from gradsieve.tools.plan.predict import Prediction, predict

MARGIN = 0.10
"""Below it two predictions cannot be distinguished: in a lab a step is off by 11 % in the median
(`plan-lab-2026-11-16.json`), though of two options in one place often in the same direction."""
ERROR_BAR = (
    "Steps are predicted. In labs of 2 to 16 hosts they were off by 11 % in the median, nine in ten by at "
    "most 32 %, and the choice was within 10 % of the best in 14 of 15 (docs/plan.md)."
)


@dataclass(frozen=True, slots=True)
class Plan:
    model: Model
    costs: Costs
    ranked: Sequence[Prediction]
    """The quickest first."""
    dense: Prediction
    best: Prediction
    reasons: Sequence[str]
    """Why not, in the same order; empty for the best."""

    @property
    def plain(self) -> bool:
        """Whether nothing is better than DDP as it is."""
        return self.best.option.name == self.dense.option.name


def make_plan(model: Model, costs: Costs, density: float, most_above: float) -> Plan:
    """`most_above`: per cent of loss above dense's that is acceptable."""

    def step(option: Option) -> float:
        return predict(option, model, costs).step

    options = every_option(model, costs, density, step)
    ranked = sorted((predict(option, model, costs) for option in options), key=lambda each: each.step)
    dense_one = predict(dense(model), model, costs)
    best = choose(ranked, most_above)
    reasons = [why_not(each, best, dense_one, model, most_above) for each in ranked]
    return Plan(model, costs, ranked, dense_one, best, reasons)


def choose(ranked: Sequence[Prediction], most_above: float) -> Prediction:
    """Of options of which dense is one, so that some are acceptable."""
    fair = [each for each in ranked if acceptable(each, most_above)]
    near = [each for each in fair if each.step <= (1 + MARGIN) * fair[0].step]
    return min(near, key=lambda each: (each.option.gap.above or 0.0, each.step))


def acceptable(prediction: Prediction, most_above: float) -> bool:
    gap = prediction.option.gap.above
    return gap is not None and gap <= most_above and not prediction.option.refused


def why_not(each: Prediction, best: Prediction, plain: Prediction, model: Model, most_above: float) -> str:
    if each.option == best.option or each.option.name == best.option.name:
        return ""
    if each.option.refused:
        return each.option.refused
    if each.step > (1 + MARGIN) * best.step:
        than = "dense" if each.step > plain.step and each is not plain else "the best"
        times = each.step / (plain if than == "dense" else best).step
        return f"{times:.1f}x {than}: {_cause(each, model)}{_consolation(each, best)}"
    gap = each.option.gap
    if gap.above is None:
        return f"{_pace(each, best)}, but its loss is not measured"
    if gap.above > most_above:
        return f"{_pace(each, best)}, but its loss ends {gap.above:.3g} % above dense"
    return f"{_pace(each, best)}, with more loss" if gap.above > (best.option.gap.above or 0) else "as fast"


def _consolation(each: Prediction, best: Prediction) -> str:
    gap, others = each.option.gap.above, best.option.gap.above
    return "; less loss" if gap is not None and others is not None and gap < others else ""


def _pace(each: Prediction, best: Prediction) -> str:
    times = best.step / each.step
    if times >= 2:
        return f"{times:,.1f} times as fast"
    return f"{100 * (times - 1):.0f} % faster" if times > 1 + MARGIN else "not clearly faster"


def _cause(each: Prediction, model: Model) -> str:
    """Where most of what it takes beyond computing goes."""
    link, computed = each.cost.link / each.option.every, each.cost.computed / each.option.every
    if computed > each.waited(model) - computed:
        return f"computes {_ms(computed)}"
    behind = {"step": "a step", "backward": "backward", "not": "nothing"}[each.option.hidden]
    return f"{_ms(link)} on the link, hidden behind {behind}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f} ms" if seconds >= 0.01 else f"{1e3 * seconds:.2g} ms"


def recommendation(plan: Plan) -> str:
    """In plain sentences."""
    best, plain, limit = plan.best, plan.dense, plan.model.compute
    if plan.plain:
        faster = [each for each in plan.ranked if each.step < plain.step]
        head = f"Use plain DDP: a step takes {_ms(plain.step)}, {_ms(plain.step - limit)} of it for exchange."
        if not faster:
            return f"{head} Nothing is predicted to be faster."
        quickest = faster[0]
        return (
            f"{head} The quickest, {quickest.option.name}, is predicted at {_ms(quickest.step)}; nothing "
            f"whose loss is known and acceptable is more than {100 * MARGIN:.0f} % faster, and "
            "smaller differences are within this model's error."
        )
    words = (
        f"Use {best.option.name}: {best.option.call}. A step takes {_ms(best.step)} instead of "
        f"{_ms(plain.step)} with plain DDP, {plain.step / best.step:.1f} times as fast; without any "
        f"communication it would take {_ms(limit)}."
    )
    if best.option.gap.above:
        words += f" Not free: its loss above dense's, on a small transformer of ours: {best.option.gap}."
    return words
