"""Small charts as SVG text: lines with a band, stacked areas, a grid of ranks by steps, bars.

All are `WIDTH` units wide with text of 12, so that a page shows them at about their own size on a telephone
and three next to each other on a desk. Legends are HTML, above: there they cannot cover anything.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from gradsieve_tools.report.gathered import Array

WIDTH, HEIGHT = 420, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 16, 10, 38
_LOG_FROM = 50.0  # ratio of high to low figures from which on an axis is logarithmic
HEAT = ["#fff7ec", "#fee8c8", "#fdd49e", "#fdbb84", "#fc8d59", "#ef6548", "#d7301f", "#7f0000"]


@dataclass(frozen=True, slots=True)
class Series:
    name: str
    colour: str
    values: Array
    low: Array | None = None
    high: Array | None = None
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Axis:
    low: float
    high: float
    start: float
    stop: float
    log: bool = False

    def place(self, values: Array) -> Array:
        low, high = self.low, self.high
        if self.log:
            values = np.log10(np.clip(values, low, None))
            low, high = math.log10(low), math.log10(high)
        share = np.clip((values - low) / (high - low), -0.02, 1.02)
        return np.asarray(self.start + share * (self.stop - self.start))

    def ticks(self) -> list[float]:
        if self.log:
            powers = range(
                math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9) + 1
            )
            if len(powers) > 1:
                return [10.0**power for power in powers][:: max(1, len(powers) // 5)]
        return _nice(self.low, self.high)


def _nice(low: float, high: float) -> list[float]:
    """Three to seven round numbers between the two."""
    raw = (high - low) / 6
    power = 10.0 ** math.floor(math.log10(raw))
    gap = next(times * power for times in (1, 2, 2.5, 5, 10) if times * power >= raw * 0.999)
    first = math.ceil(low / gap - 1e-9)
    return [gap * number for number in range(first, math.floor(high / gap + 1e-9) + 1)]


def spoken(value: float) -> str:
    """A number in few letters: 1.5M, 20k, 0.003."""
    for power, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= power:
            return f"{value / (1e3 if letter == 'k' else power):.4g}{letter}"
    if 0 < abs(value) < 1e-3:
        digits, power_of_ten = f"{value:.1e}".split("e")
        return f"{digits.removesuffix('.0')}e{int(power_of_ten)}"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def _range(series: Sequence[Series], from_zero: bool, show: Sequence[float]) -> tuple[float, float, bool]:
    """Ends of the axis, and whether it is logarithmic. A few outliers do not flatten the rest."""
    parts = [each for one in series for each in (one.values, one.low, one.high) if each is not None]
    every = np.concatenate([*parts, np.array(show, dtype=float)])
    every = every[np.isfinite(every)]
    if not len(every):
        return 0.0, 1.0, False
    low, high = float(np.percentile(every, 1)), float(np.percentile(every, 99))
    low, high = min([low, *show]), max([high, *show])
    if low > 0 and high / low > _LOG_FROM:
        return low / 1.2, high * 1.2, True
    low = min(low, 0.0) if from_zero else low
    margin = 0.06 * (high - low) or abs(high) * 0.1 or 1.0
    return low - (0.0 if from_zero and low == 0 else margin), high + margin, False


def lines(
    steps: Array,
    ends: tuple[int, int],
    series: Sequence[Series],
    unit: str,
    *,
    from_zero: bool = False,
    mark: float | None = None,
) -> str:
    """Draw one line each over steps, its band faint; `mark` is drawn across. `ends` are the axis's."""
    shown = [] if mark is None else [mark]
    low, high, log = _range(series, from_zero, shown)
    across, up = _axes(ends, low, high, log)
    parts = [_frame(across, up, unit)]
    places = across.place(steps)
    if mark is not None:
        y = up.place(np.array([mark]))[0]
        parts.append(f'<path class="mark" d="M{_LEFT} {y:.1f}H{WIDTH - _RIGHT}"/>')
    for one in series:
        if one.low is not None and one.high is not None:
            parts.append(_band(places, up.place(one.low), up.place(one.high), one.colour))
    for one in series:
        dash = ' stroke-dasharray="5 3"' if one.dashed else ""
        path = _path(places, up.place(one.values))
        parts.append(f'<path fill="none" stroke="{one.colour}" stroke-width="1.8"{dash} d="{path}"/>')
    return _svg(parts, HEIGHT, unit)


def stacked(
    steps: Array, ends: tuple[int, int], series: Sequence[Series], over: Series | None, unit: str
) -> str:
    """Areas on top of each other, from the first one up; `over` is a line in front."""
    tops = np.cumsum([np.nan_to_num(one.values) for one in series], axis=0)
    whole = Series("", "", tops[-1])
    most = max(np.nanmax(one.values, initial=0.0) for one in (whole, over) if one is not None)
    across, up = _axes(ends, 0.0, 1.06 * most or 1.0, False)
    places, below = across.place(steps), up.place(np.zeros(len(steps)))
    parts = [_frame(across, up, unit)]
    for one, top in zip(series, tops, strict=True):
        above = up.place(top)
        parts.append(_band(places, below, above, one.colour, faint=False))
        below = above
    if over is not None:
        path = _path(places, up.place(over.values))
        parts.append(f'<path class="over" d="{path}"/>')
    return _svg(parts, HEIGHT, unit)


def grid(
    ends: tuple[int, int], ranks: Sequence[int], values: Array, unit: str
) -> tuple[str, list[tuple[str, str]]]:
    """Ranks by steps, the darker the more; and what the colours mean."""
    tall = max(3.0, min(24.0, 260 / len(ranks)))
    bottom = _TOP + tall * len(ranks)
    across = Axis(*ends, _LEFT, WIDTH - _RIGHT)
    known = values[np.isfinite(values)]
    most = float(np.percentile(known, 99.5)) if len(known) else 0.0
    levels = np.clip(np.nan_to_num(values, nan=-1.0) / (most or 1.0) * len(HEAT), -1, len(HEAT) - 1)
    edges = np.linspace(_LEFT, WIDTH - _RIGHT, values.shape[1] + 1)
    paths: list[list[str]] = [[] for _ in HEAT]
    for row, own in enumerate(np.floor(levels).astype(int)):
        stops = [*np.flatnonzero(np.diff(own)) + 1, len(own)]
        for start, end in zip([0, *stops], stops, strict=False):  # one piece for equal neighbours
            if own[start] >= 0:
                wide = edges[end] - edges[start]
                box = f"M{edges[start]:.1f} {_TOP + row * tall:.1f}h{wide:.1f}v{tall:.1f}h{-wide:.1f}z"
                paths[own[start]].append(box)
    parts = [
        f'<path fill="{colour}" d="{"".join(own)}"/>' for colour, own in zip(HEAT, paths, strict=True) if own
    ]
    every = max(1, math.ceil(len(ranks) * 14 / (bottom - _TOP)))
    for row in range(0, len(ranks), every):
        y = _TOP + (row + 0.5) * tall + 4
        parts.append(f'<text x="{_LEFT - 6}" y="{y:.1f}" text-anchor="end">rank {ranks[row]}</text>')
    parts += _steps_axis(across, bottom)
    starts = [spoken(most / len(HEAT) * number) for number in range(len(HEAT))]
    legend = [
        (colour, f"{start} to {stop}" if stop else f"{start} and more")
        for colour, start, stop in zip(HEAT, starts, [*starts[1:], ""], strict=True)
    ]
    return _svg(parts, bottom + _BOTTOM, unit), legend


def bars(names: Sequence[str], values: Sequence[float], unit: str, colour: str) -> str:
    """Draw bars one below the other, with their figures."""
    most = max(values) or 1.0
    parts = []
    for row, (name, value) in enumerate(zip(names, values, strict=True)):
        y, wide = _TOP + 20 * row, (WIDTH - 2 * _LEFT - _RIGHT) * value / most
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 12}" text-anchor="end">{escape(name)}</text>')
        parts.append(f'<rect fill="{colour}" x="{_LEFT}" y="{y}" width="{wide:.1f}" height="15"/>')
        parts.append(f'<text x="{_LEFT + wide + 5:.1f}" y="{y + 12}">{spoken(value)}</text>')
    bottom = _TOP + 20 * len(values) + 16
    parts.append(f'<text x="{_LEFT}" y="{bottom - 2}">{escape(unit)}</text>')
    return _svg(parts, bottom + 4, unit)


def _axes(ends: tuple[int, int], low: float, high: float, log: bool) -> tuple[Axis, Axis]:
    across = Axis(*ends, _LEFT, WIDTH - _RIGHT)
    return across, Axis(low, high, HEIGHT - _BOTTOM, _TOP, log)


def _frame(across: Axis, up: Axis, unit: str) -> str:
    parts = _steps_axis(across, HEIGHT - _BOTTOM)
    ticks = up.ticks()
    for tick, y in zip(ticks, up.place(np.array(ticks)), strict=True):
        parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{WIDTH - _RIGHT}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{spoken(tick)}</text>')
    return "".join(parts)


def _steps_axis(across: Axis, bottom: float) -> list[str]:
    ticks = [tick for tick in across.ticks() if tick == int(tick)]
    parts = [f'<path class="axis" d="M{_LEFT} {bottom:.1f}H{WIDTH - _RIGHT}"/>']
    for tick, x in zip(ticks, across.place(np.array(ticks, dtype=float)), strict=True):
        parts.append(f'<path class="axis" d="M{x:.1f} {bottom:.1f}v4"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 17:.1f}" text-anchor="middle">{spoken(tick)}</text>')
    parts.append(f'<text x="{(_LEFT + WIDTH) / 2}" y="{bottom + 33:.1f}" text-anchor="middle">step</text>')
    return parts


def _pieces(*rows: Array) -> list[slice]:
    known = np.concatenate([[False], np.isfinite(rows).all(axis=0), [False]])
    edges = np.flatnonzero(np.diff(known.astype(int)))
    return [slice(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True)]


def _points(xs: Array, ys: Array) -> str:
    return "L".join(f"{x:.1f} {y:.1f}" for x, y in zip(xs, ys, strict=True))


def _path(places: Array, heights: Array) -> str:
    """Steps without a figure are bridged where every so many have one, as norms do."""
    known = np.isfinite(heights)
    return "M" + _points(places[known], heights[known]) if known.any() else ""


def _band(places: Array, low: Array, high: Array, colour: str, faint: bool = True) -> str:
    parts = [
        f"M{_points(places[own], high[own])}L{_points(places[own][::-1], low[own][::-1])}z"
        for own in _pieces(low, high)
    ]
    look = ' fill-opacity="0.2"' if faint else ""
    return f'<path fill="{colour}"{look} d="{"".join(parts)}"/>'


def _svg(parts: Sequence[str], height: float, label: str) -> str:
    head = f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(label)}">'
    return head + "".join(parts) + "</svg>"
