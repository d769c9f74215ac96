"""The ranking, the recommendation, and why not the others.

What counts is the time until a training has the loss that dense ends with: the predicted step times the steps
that were measured. Recommended is the option with the smallest loss at the same number of steps among those
that cannot be distinguished from the first to have it: which need at most MARGIN longer. What loses anything
has to be sooner than plain DDP by as much, or plain DDP is the answer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gradsieve_tools.costs import Costs
from gradsieve_tools.plan import quality
from gradsieve_tools.plan.options import Model, Option, dense, every_option
from gradsieve_tools.plan.predict import Prediction, predict

# Below it two predictions cannot be distinguished: in a lab a step is off by 11 % in the median
# (`plan-lab-2026-11-16.json`), though of two options in one place often in the same direction
MARGIN = 0.10
_IN_LABS = (
    "Steps are predicted. In labs of 2 to 16 hosts they were off by 11 % in the median, nine in ten by at "
    "most 32 %, and the choice was within 10 % of the best in 14 of 15 (docs/plan.md)."
)
_ON_GPUS = (
    "Steps are predicted. Of DDP and LocalSGD on four L40S hosts they were off by 4 % in the median of 21, "
    "30 % at most. gradsieve itself was never measured on a GPU: its rows are predictions only "
    "(docs/plan.md)."
)


def error_bar(costs: Costs) -> str:
    return _ON_GPUS if costs.host.launch else _IN_LABS


@dataclass(frozen=True, slots=True)
class Plan:
    model: Model
    costs: Costs
    ranked: Sequence[Prediction]  # options with dense's loss first, then those never measured: quickest first
    dense: Prediction
    best: Prediction
    reasons: Sequence[str]  # why not, in the same order; empty for the best

    @property
    def plain(self) -> bool:
        """Return whether nothing is better than DDP as it is."""
        return self.best.option.name == self.dense.option.name


def make_plan(model: Model, costs: Costs, density: float, most_above: float) -> Plan:
    """`most_above`: per cent of loss above dense's, after as many steps, that is acceptable."""

    def step(option: Option) -> float:
        return predict(option, model, costs).step

    options = every_option(model, costs, density, step)
    ranked = sorted((predict(option, model, costs) for option in options), key=_rank)
    dense_one = predict(dense(model), model, costs)
    best = choose(ranked, most_above)
    reasons = [why_not(each, best, model, most_above) for each in ranked]
    return Plan(model, costs, ranked, dense_one, best, reasons)


def choose(ranked: Sequence[Prediction], most_above: float) -> Prediction:
    fair = [each for each in ranked if acceptable(each, most_above)]
    lossless = min(_to_loss(each) for each in fair if not each.option.gap.above)
    clearly = [each for each in fair if not each.option.gap.above or (1 + MARGIN) * _to_loss(each) < lossless]
    soonest = min(map(_to_loss, clearly))
    near = [each for each in clearly if _to_loss(each) <= (1 + MARGIN) * soonest]
    return min(near, key=lambda each: (each.option.gap.above or 0.0, _to_loss(each)))


def acceptable(prediction: Prediction, most_above: float) -> bool:
    gap = prediction.option.gap
    known = gap.above is not None and gap.above <= most_above and gap.steps is not None
    return known and not prediction.option.refused


def _rank(prediction: Prediction) -> tuple[float, bool, float]:
    return _to_loss(prediction), prediction.option.gap.above is None, prediction.step


def _to_loss(prediction: Prediction) -> float:
    return math.inf if prediction.to_loss is None else prediction.to_loss


def why_not(each: Prediction, best: Prediction, model: Model, most_above: float) -> str:
    if each.option.name == best.option.name:
        return ""
    if each.option.refused:
        return each.option.refused
    gap = each.option.gap
    longer = each.step / best.step
    if gap.above is None or each.to_loss is None or best.to_loss is None:
        unknown = "loss not measured" if gap.above is None else "steps to dense's loss not measured"
        return f"{longer:.1f}x the step: {_cause(each, model)}" if longer > 1 + MARGIN else unknown
    if gap.above > most_above:
        return f"ends {gap.above:.3g} % above dense's loss"
    later = each.to_loss / best.to_loss
    if later <= 1 + MARGIN and gap.above >= (best.option.gap.above or 0.0):
        return "as fast, with more loss"
    why = _cause(each, model) if longer > 1 + MARGIN else f"{gap.steps:.3g}x the steps"
    return f"{later:.1f}x the time: {why}"


def _cause(each: Prediction, model: Model) -> str:
    link, computed = each.cost.link / each.option.every, each.cost.computed / each.option.every
    if computed > each.waited(model) - computed:
        return f"computes {_ms(computed)}"
    return f"link {_ms(link)}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f} ms" if seconds >= 0.01 else f"{1e3 * seconds:.2g} ms"


def recommendation(plan: Plan) -> str:
    best, plain, limit = plan.best, plan.dense, plan.model.compute
    if plan.plain:
        head = f"Use plain DDP: a step takes {_ms(plain.step)}, {_ms(plain.step - limit)} of it for exchange."
        quickest = min(plan.ranked, key=lambda each: each.step)
        if quickest.step >= plain.step:
            return f"{head} Nothing is predicted to be faster."
        return (
            f"{head} The quickest step, {quickest.option.name}, is predicted at {_ms(quickest.step)}. But "
            f"nothing whose loss is known and acceptable has DDP's loss more than {100 * MARGIN:.0f} % "
            "sooner, and smaller differences are within this model's error."
        )
    assert best.to_loss is not None  # acceptable
    words = (
        f"Use {best.option.name}: {best.option.call}. It is predicted to reach plain DDP's loss "
        f"{plain.step / best.to_loss:.1f} times as fast. A step takes {_ms(best.step)} instead of "
        f"{_ms(plain.step)}, {plain.step / best.step:.1f} times as fast ({_ms(limit)} without any "
        f"communication), and it needs {best.option.gap.steps:.3g} times as many steps."
    )
    if best.option.gap.above:
        words += f" After as many steps as dense its loss is above dense's by {best.option.gap}."
    return f"{words} {quality.measured_with(plan.costs.world)}"
