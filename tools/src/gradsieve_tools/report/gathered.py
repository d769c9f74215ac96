"""All ranks' records of a training side by side, as arrays: a row a rank, a column a step.

A folder may hold several trainings: files of the same name but for the rank are one's. What a report needs of
a long training fits in memory: beyond `_MOST_LINES` only every so many steps are kept, the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gradsieve.errors import ConfigError, Malformed, list_ranks
from gradsieve_tools.records import SUFFIX, Header, Line, Whole, pieces
from gradsieve_tools.stages import EXCHANGE_STAGES, WAITING

Array = npt.NDArray[np.float64]

COLUMNS = (
    "at",
    "density",
    "bits",
    "threshold",
    "imbalance",
    "cut",
    "waiting",
    "age",
    "contraction",
    "xi",
    "loss",
)
_MOST_LINES = 3_000_000
_LINE_BYTES = 400  # about, of a line
_MOST_FILES = 4096
_MOST_STAGES = 40
_PAUSE = 10.0  # times a usual step
STEADY_FROM = 0.2  # share of the steps before it is left out: kernels compile, thresholds are found


@dataclass
class Training:
    header: Header
    ranks: list[int]
    steps: npt.NDArray[np.int64]
    columns: dict[str, Array]  # NaN: the rank has no such figure
    stages: dict[str, Array]
    thinned: int = 1  # one step of so many was kept
    notes: list[str] = field(default_factory=list)  # remarks on the files

    @cached_property
    def step_seconds(self) -> Array:
        """Since the exchange before, for one exchange. A pause (an evaluation, a checkpoint, another sync's
        turn in a bench) is no step, and is left out."""
        at = self.columns["at"]
        gaps = np.full_like(at, np.nan)
        gaps[:, 1:] = np.diff(at, axis=1) / np.diff(self.steps)
        known = gaps[np.isfinite(gaps)]
        if len(known):
            gaps[gaps > _PAUSE * np.median(known)] = np.nan
        return gaps

    @cached_property
    def bytes(self) -> Array:
        """Moved by a rank in one exchange."""
        return self.columns["bits"] * self.header.bytes_a_bit

    @cached_property
    def dense_bits(self) -> float:
        """A parameter and step, with which all of it is sent as it is: there, and the sum back."""
        world = self.header.world
        return 64.0 * (world - 1) / world / self.header.period

    @property
    def is_dense(self) -> npt.NDArray[np.bool_]:
        """Return whether all of it was sent as it is. Stripes send all elements in few bits, too."""
        all_elements = self.columns["density"] == 1.0
        if not self.header.scheme.startswith("stripes"):
            return np.asarray(all_elements)
        return np.asarray(all_elements & (self.columns["bits"] > 0.9 * self.dense_bits))

    @cached_property
    def engine_seconds(self) -> Array:
        own = [values for name, values in self.stages.items() if name != WAITING]
        return np.nansum(own, axis=0) if own else np.full_like(self.columns["at"], np.nan)

    @cached_property
    def is_virtual(self) -> bool:
        """Return whether one process ran all ranks: only then is xi known, and seconds say nothing."""
        return bool(np.isfinite(self.columns["xi"]).any())

    @cached_property
    def waits(self) -> Array:
        """Seconds a rank spent in collectives beyond those of the rank that spent least: that one came last,
        and the others waited for it. Only of steps that all ranks have."""
        exchange = self.stages.get("exchange")
        if exchange is None or len(self.ranks) < 2 or self.is_virtual:
            return np.full_like(self.columns["at"], np.nan)
        return np.asarray(exchange - exchange.min(axis=0))

    @cached_property
    def last(self) -> npt.NDArray[np.int64]:
        """Row of the rank that came last, of the steps in which `waits` is known."""
        known = np.isfinite(self.waits).all(axis=0)
        return np.asarray(np.argmin(self.waits[:, known], axis=0))

    def steady(self, values: Array) -> Array:
        """Figures of the steps that are evaluated, in one row."""
        later = values[:, int(STEADY_FROM * len(self.steps)) :].ravel()
        return later[np.isfinite(later)]

    def median(self, values: Array) -> float | None:
        later = self.steady(values)
        return float(np.median(later)) if len(later) else None


def files_of(places: Sequence[Path]) -> list[Path]:
    found: list[Path] = []
    for place in places:
        found += sorted(place.glob(f"*{SUFFIX}")) if place.is_dir() else [place]
    if not found:
        raise ConfigError(f"there is no record in {', '.join(map(str, places))}: no file *{SUFFIX}")
    if len(found) > _MOST_FILES:
        raise ConfigError(f"{len(found):,} files are too many at once: name those of one training")
    return found


def gather(paths: Sequence[Path]) -> list[Training]:
    """Malformed where a file is no record, or two say they are the same rank."""
    try:
        size = sum(piece.stat().st_size for path in paths for piece in pieces(path))
    except OSError as error:
        raise Malformed(f"cannot be read: {error}") from error
    every = max(1, round(size / _LINE_BYTES / _MOST_LINES + 0.5)) if size > _MOST_LINES * _LINE_BYTES else 1
    found: dict[str, list[_Rank]] = {}
    for path in paths:
        rank = _Rank(path, every)
        found.setdefault(rank.header.name, []).append(rank)
    return [
        _side_by_side(sorted(ranks, key=lambda rank: rank.header.rank), every) for ranks in found.values()
    ]


class _Rank:
    def __init__(self, path: Path, every: int) -> None:
        self.path = path
        whole = Whole(path)
        steps: list[int] = []
        columns: dict[str, list[float]] = {name: [] for name in COLUMNS}
        stages: dict[str, dict[int, float]] = {}
        for line in whole.each():
            while steps and steps[-1] >= line.step:  # taken again after a restart: the later one counts
                steps.pop()
                _drop(len(steps), columns, stages)
            if line.step % every == 0:
                _add(line, len(steps), columns, stages)
                steps.append(line.step)
        if len(stages) > _MOST_STAGES:
            raise Malformed(f"{path} has {len(stages)} stages; a step has about ten")
        self.header, self.joined, self.is_cut_off = whole.header, whole.joined, whole.is_cut_off
        self.steps = np.array(steps, dtype=np.int64)
        self.columns = {name: np.array(values, dtype=np.float64) for name, values in columns.items()}
        self.stages = {name: self._spread(values) for name, values in stages.items()}

    def _spread(self, values: dict[int, float]) -> Array:
        """A stage that a line does not have took no time in it."""
        row = np.zeros(len(self.steps))
        row[list(values)] = list(values.values())
        return row


def _add(
    line: Line, place: int, columns: dict[str, list[float]], stages: dict[str, dict[int, float]]
) -> None:
    for name, column in columns.items():
        value = getattr(line, name)
        column.append(np.nan if value is None else value)
    for stage, seconds in line.seconds.items():
        stages.setdefault(stage, {})[place] = seconds


def _drop(place: int, columns: dict[str, list[float]], stages: dict[str, dict[int, float]]) -> None:
    for column in columns.values():
        column.pop()
    for each in stages.values():
        each.pop(place, None)


def _side_by_side(ranks: list[_Rank], every: int) -> Training:
    header = ranks[0].header
    for one, other in pairwise(ranks):
        if one.header.rank == other.header.rank:
            raise Malformed(f"{one.path} and {other.path} both are rank {one.header.rank} of {header.name!r}")
        if (other.header.world, other.header.parameters) != (header.world, header.parameters):
            raise Malformed(f"{one.path} and {other.path} are of trainings of different sizes")
    steps = np.unique(np.concatenate([rank.steps for rank in ranks]))
    if len(steps) < 2:
        raise ConfigError(f"{header.name}: fewer than two steps are recorded, there is nothing to show yet")
    places = [np.searchsorted(steps, rank.steps) for rank in ranks]

    def rows(of: list[Array | None]) -> Array:
        grid = np.full((len(ranks), len(steps)), np.nan)
        for row, place, values in zip(grid, places, of, strict=True):
            row[place] = 0.0 if values is None else values
        return grid

    known = dict.fromkeys(name for rank in ranks for name in rank.stages)
    order = [name for name in EXCHANGE_STAGES if name in known]
    training = Training(
        header,
        [rank.header.rank for rank in ranks],
        steps,
        {name: rows([rank.columns[name] for rank in ranks]) for name in COLUMNS},
        {
            name: rows([rank.stages.get(name) for rank in ranks])
            for name in [*order, *(name for name in known if name not in order)]
        },
        thinned=every,
    )
    training.notes = _notes(ranks, training)
    return training


def _notes(ranks: list[_Rank], training: Training) -> list[str]:
    notes, header, last = [], training.header, int(training.steps[-1])
    if training.thinned > 1:
        notes.append(f"Of every {training.thinned} steps one is shown: the files are long.")
    if len(ranks) < header.world:
        notes.append(f"{len(ranks)} of {header.world} ranks are recorded here.")
    if cut := [rank.header.rank for rank in ranks if rank.is_cut_off]:
        notes.append(f"The file of {list_ranks(cut)} ends in the middle of a line, which is left out.")
    if lives := max(rank.joined.lives - 1 for rank in ranks):
        again = max(rank.joined.again for rank in ranks)
        notes.append(
            f"The training was started again {_times(lives)}. {again:,} steps were taken again since then, "
            "from a checkpoint or from the beginning, and are shown as they were taken last."
        )
    if torn := [rank.header.rank for rank in ranks if len(rank.joined.torn) > rank.is_cut_off]:
        notes.append(
            f"A line of {list_ranks(torn)} was not finished (a full disk, or a kill): the record has a gap "
            "there."
        )
    ends = {rank.header.rank: int(rank.steps[-1]) if len(rank.steps) else 0 for rank in ranks}
    if behind := [rank for rank, end in ends.items() if end < last - 1]:
        first = min(ends.values())
        notes.append(f"The record of {list_ranks(behind)} ends before the others', at step {first:,}.")
    if training.is_virtual:
        notes.append(
            "Ranks ran round robin in one process: seconds are those of the process, not of a network, and "
            "are not evaluated."
        )
    if header.period > 1:
        notes.append(f"Ranks exchange every {header.period} steps: a step here is an exchange.")
    return notes


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count:,} times"
