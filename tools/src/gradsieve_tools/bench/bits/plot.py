"""The picture of `bench bits`: what an exchange sends against its bits, one panel a task, next to the bound.

A line is a scheme with one way to send values, from its lowest density to its highest. Stripes, ExDyna and
top-k are coloured, the first two in a shade for every way to send values, dark for few bits; what is marked
alike sends values alike. The others are grey, and only with values as they are: all ways would be a tangle.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gradsieve.schemes import VALUE_CODECS
from gradsieve_tools.bench.bits.measure import bound

_SHADES = {"stripes": "Blues", "exdyna": "Oranges"}
_ONE_COLOUR = {"topk": "tab:green"}
_DARK, _LIGHT = 0.95, 0.35
_MARKS = dict(zip(VALUE_CODECS, "osD^vP", strict=True))
_STYLES = ("-", "--", ":", "-.")
_GREY_MARKS = ("", "x", "+", "1", "2", "3", "4", "|", "_", ".")
_LEAST_BITS = 0.01  # fewer bits would take most of a logarithmic axis
_POINTS = 200
_DPI = 150

Family = tuple[str, str]  # scheme and values


def plot(rows: Sequence[dict[str, Any]], world: int, path: Path) -> None:
    from matplotlib.figure import Figure  # the `plot` extra, not needed to measure

    shown = list(dict.fromkeys(row["task"] for row in rows))
    families = families_of(rows)
    figure = Figure(figsize=(2.5 + 5.5 * len(shown), 6.5), layout="constrained")
    panels = figure.subplots(1, len(shown), squeeze=False, sharex=True, sharey=True)[0]
    drawn: dict[str, Any] = {}
    for task, axes in zip(shown, panels, strict=True):
        own = [row for row in rows if row["task"] == task]
        for family, look in looks(families):
            places = line_of(own, family)
            if places:
                drawn[_name(family, families)] = axes.plot(*zip(*places, strict=True), **look)[0]
        drawn["Gaussian bound"] = _draw_bound(axes, [row["bits"] for row in rows], world)
        axes.set_title(task, size=11)
        axes.set_xlabel("bits a parameter, moved by the busiest rank")
    panels[0].set_ylabel("share of the mean's energy that one exchange sends")
    figure.suptitle(f"{world} ranks: what one exchange sends of the residual, for its bits", size=12)
    names = ["Gaussian bound", *(name for name in drawn if name != "Gaussian bound")]
    figure.legend([drawn[name] for name in names], names, loc="outside right upper", fontsize=8)
    figure.savefig(path, dpi=_DPI)


def families_of(rows: Sequence[dict[str, Any]]) -> list[Family]:
    """Those that are drawn, coloured ones first; of the others one each, with values as exact as measured."""
    found = list(dict.fromkeys((row["scheme"], row["values"]) for row in rows))
    order = list(VALUE_CODECS)
    by_scheme: dict[str, list[str]] = {}
    for scheme, values in sorted(found, key=lambda each: order.index(each[1])):
        by_scheme.setdefault(scheme, []).append(values)
    coloured = [name for name in (*_SHADES, *_ONE_COLOUR) if name in by_scheme]
    grey = sorted(name for name in by_scheme if name not in coloured)
    shaded = [(name, values) for name in coloured for values in by_scheme[name]]
    return shaded + [(name, by_scheme[name][0]) for name in grey]


def looks(families: Sequence[Family]) -> Iterator[tuple[Family, dict[str, Any]]]:
    """No two alike."""
    from matplotlib import colormaps

    order, grey = list(VALUE_CODECS), 0
    colour: Any
    for scheme, values in families:
        if scheme in _SHADES:
            part = order.index(values) / (len(order) - 1)
            colour = colormaps[_SHADES[scheme]](_LIGHT + part * (_DARK - _LIGHT))
        elif scheme in _ONE_COLOUR:
            colour = _ONE_COLOUR[scheme]
        else:
            mark, style = _GREY_MARKS[grey // len(_STYLES) % len(_GREY_MARKS)], _STYLES[grey % len(_STYLES)]
            thin = {"color": "0.6", "linewidth": 0.8, "markersize": 5, "zorder": 1}
            yield (scheme, values), {**thin, "linestyle": style, "marker": mark}
            grey += 1
            continue
        thick = {"color": colour, "linewidth": 1.8, "markersize": 5, "zorder": 3}
        yield (scheme, values), {**thick, "marker": _MARKS[values]}


def line_of(rows: Sequence[dict[str, Any]], family: Family) -> list[tuple[float, float]]:
    """Bits and what they send, not below nothing, by density."""
    own = [row for row in rows if (row["scheme"], row["values"]) == family and row["bits"] >= _LEAST_BITS]
    return [(row["bits"], max(0.0, row["known"])) for row in sorted(own, key=lambda row: row["density"])]


def _name(family: Family, families: Sequence[Family]) -> str:
    scheme, values = family
    alone = sum(other == scheme for other, _ in families) == 1 and values == "exact"
    return scheme if alone else f"{scheme}, {values}"


def _draw_bound(axes: Any, bits: Sequence[float], world: int) -> Any:
    """From the fewest bits measured to the most."""
    there = [each for each in bits if each >= _LEAST_BITS] or [_LEAST_BITS, 1.0]
    low, high = math.log10(min(there)) - 0.1, math.log10(max(there)) + 0.1
    spread = [10 ** (low + (high - low) * at / (_POINTS - 1)) for at in range(_POINTS)]
    (line,) = axes.plot(spread, [bound(each, world) for each in spread], "k--", linewidth=1.5, zorder=4)
    axes.set_xscale("log")
    axes.set_xlim(spread[0], spread[-1])
    axes.set_ylim(0.0, 1.02)
    axes.grid(alpha=0.3)
    return line
