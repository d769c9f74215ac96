"""A plan for people and for programs."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gradsieve.comm.links import Links
from gradsieve_tools import results
from gradsieve_tools.costs import Costs, with_rings
from gradsieve_tools.plan.choose import Plan, acceptable, error_bar, recommendation
from gradsieve_tools.plan.options import Model, Option, automatic, dense, no_communication
from gradsieve_tools.plan.predict import Prediction, predict
from gradsieve_tools.quantities import BITS, BYTES_A_SECOND, ELEMENTS_A_SECOND, spoken

WIDTH = 100  # columns of a terminal
_MB = 1e6
_RATES = [10 ** (7 + place / 10) for place in range(41)]  # bit/s of a picture: 10 Mbit/s to 100 Gbit/s
_DRAWN = 4  # options of a picture besides dense, the recommended one and no communication
_SHOWN = 6  # rows, where not all are asked for
_SHORT = ["option", "to_loss", "step_ms", "of_link", "above", "why_not"]
_PRICED = ["option", "to_loss", "step_ms", "money_a_day", "why_not"]
_LONG = ["option", "to_loss", "step_ms", "vs_dense", "of_link", "bits", "memory_mb", "gap", "why_not"]


def rows(plan: Plan, price: float | None) -> list[dict[str, Any]]:
    """Return one an option, the first to have dense's loss first; before them the limit."""
    limit = predict(no_communication(plan.model), plan.model, plan.costs)
    labels = ["the limit", *(reason or "RECOMMENDED" for reason in plan.reasons)]
    return [_row(each, plan, why, price) for each, why in zip([limit, *plan.ranked], labels, strict=True)]


def _row(each: Prediction, plan: Plan, why: str, price: float | None) -> dict[str, Any]:
    above = each.option.gap.above
    row = {
        "option": each.option.name,
        "call": each.option.call,
        "to_loss": None if each.to_loss is None else round(plan.dense.step / each.to_loss, 2),
        "step_ms": round(1e3 * each.step, 3),
        "vs_dense": round(plan.dense.step / each.step, 3),
        "link_ms": round(1e3 * each.cost.link, 3),
        "computed_ms": round(1e3 * each.cost.computed, 3),
        "rounds": each.cost.rounds,
        "of_link": round(each.of_link, 3),
        "bits": round(each.bits, 3),
        "memory_mb": round(each.option.memory / _MB, 1),
        "gb_a_day": round(each.gb_a_day, 3),
        "gap": str(each.option.gap) if each.option.call else "-",
        "gap_percent": above,
        "above": None if above is None else f"{above:.1f} %",
        "why_not": why,
    }
    return row if price is None else row | {"money_a_day": round(price * each.gb_a_day, 2)}


def text(plan: Plan, price: float | None, whole: bool) -> str:
    """`whole`: all rows and columns, however wide."""
    found = rows(plan, price)
    if whole:
        place = _LONG.index("gap")
        columns = _LONG if price is None else [*_LONG[:place], "money_a_day", *_LONG[place:]]
        table = results.table(found, columns)
    else:
        columns = _SHORT if price is None else _PRICED
        table = f"{results.table(_first(found, plan), columns)}\n({len(found) - _SHOWN} more: --all)"
    return "\n\n".join([table, paragraph(recommendation(plan)), paragraph(error_bar(plan.costs))])


def _first(found: list[dict[str, Any]], plan: Plan) -> list[dict[str, Any]]:
    """The limit, what is recommended, dense, and of the others those that have dense's loss first."""
    always = ["the limit", "RECOMMENDED"]
    chosen = [row for row in found if row["why_not"] in always or row["option"] == plan.dense.option.name]
    others = [row for row in found if row not in chosen]
    chosen += others[: _SHOWN - len(chosen)]
    return [row for row in found if row in chosen]


def paragraph(words: str) -> str:
    return textwrap.fill(words, WIDTH, break_long_words=False, break_on_hyphens=False)


def draw(plan: Plan, most_above: float, path: Path) -> None:
    """The step of the best options against the rate of the links, all else as it is."""
    from matplotlib.figure import Figure  # the `plot` extra, not needed to plan

    figure = Figure(figsize=(10, 6), layout="constrained")
    axes = figure.add_subplot()
    model, rates = plan.model, [rate / 1e6 for rate in _RATES]
    for number, option in enumerate(_drawn(plan, most_above)):
        steps = [
            predict(_at(option, plan, rate), model, _with_rate(plan.costs, rate)).step for rate in _RATES
        ]
        chosen = option == plan.best.option
        label = f"{option.name}{' (recommended)' if chosen else ''}"
        axes.plot(rates, steps, label=label, color=f"C{number % 10}", linewidth=2.5 if chosen else 1.5)
    axes.axhline(model.compute, color="black", linestyle=":", label="no communication")
    axes.axvline(plan.costs.links.bandwidth / 1e6, color="gray", linestyle="--", label="your links")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks([10 ** (1 + place) for place in range(5)], ["10", "100", "1,000", "10,000", "100,000"])
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("rate of a rank's link, Mbit/s")
    axes.set_ylabel("predicted step, s")
    axes.set_title(
        f"{model.parameters:,} parameters, {plan.costs.world} ranks, {1e3 * model.compute:,.4g} ms of "
        f"computing, {1e3 * plan.costs.links.latency:,.3g} ms a round"
    )
    axes.grid(alpha=0.3, which="both")
    axes.legend(loc="upper right")
    figure.savefig(path, dpi=150)


def _drawn(plan: Plan, most_above: float) -> list[Option]:
    """Dense, the recommended one, and the quickest of the others whose loss is known first."""
    known_first: Sequence[Prediction] = sorted(
        plan.ranked, key=lambda each: (not acceptable(each, most_above), each.step)
    )
    first = [dense(plan.model).name, plan.best.option.name]
    by_name = {each.option.name: each.option for each in plan.ranked}
    names = dict.fromkeys([*first, *(each.option.name for each in known_first)])
    return [by_name[name] for name in list(names)[: _DRAWN + len(set(first))]]


def _at(option: Option, plan: Plan, rate: float) -> Option:
    if option.name.startswith("auto"):
        every = 1 if option.name == "auto" else option.every
        return automatic(plan.model, _with_rate(plan.costs, rate), every)
    return option


def _with_rate(costs: Costs, rate: float) -> Costs:
    links = with_rings(Links.at(costs.links.latency, rate), costs.world)
    return replace(costs, links=links, rings=None)


def describe(model: Model, costs: Costs) -> str:
    """Return what a plan is made from."""
    links, host = costs.links, costs.host
    launch = f", {1e6 * host.launch:.3g} us a kernel launch, NCCL" if host.launch else ""
    return (
        f"{costs.world} ranks, {spoken(round(links.bandwidth), BITS)}, {1e3 * links.latency:.3g} ms a round; "
        f"{model.parameters:,} parameters, forward {1e3 * model.forward:,.4g} ms, backward "
        f"{1e3 * model.backward:,.4g} ms; memory {spoken(host.memory, BYTES_A_SECOND)}, selection "
        f"{spoken(host.selection, ELEMENTS_A_SECOND)}{launch}"
    )
