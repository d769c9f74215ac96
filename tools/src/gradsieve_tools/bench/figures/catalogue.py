"""`gradsieve figure`: the figures of the five papers, and of the study, drawn from runs of one's own.

A figure is named by its paper and by what it shows; papers number theirs differently from version to version,
so that no number is claimed. `data.py` reads the files, `draw.py` has a function for each kind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from gradsieve.errors import ConfigError
from gradsieve_tools.bench.figures import data, draw


@dataclass(frozen=True, slots=True)
class Kind:
    shows: str
    command: str  # makes the files; {} are the syncs
    read: Callable[[Sequence[Path]], Any]
    draw: Callable[[Any, Any], None]


@dataclass(frozen=True, slots=True)
class Figure:
    name: str
    source: str
    kind: Kind
    syncs: str

    @property
    def command(self) -> str:
        return "gradsieve bench " + self.kind.command.format(self.syncs)

    def plot(self, files: Sequence[Path], path: Path) -> None:
        from matplotlib.figure import Figure as Canvas  # the `plot` extra, not needed to measure

        found = self.kind.read(files)
        canvas = Canvas(figsize=(8, 5), layout="constrained")
        axes = canvas.add_subplot()
        axes.set_axisbelow(True)
        axes.grid(alpha=0.3)
        self.kind.draw(axes, found)
        axes.set_title(f"{self.kind.shows}, {self.source}", size=10)
        axes.spines[["top", "right"]].set_visible(False)
        handles, labels = axes.get_legend_handles_labels()
        columns = 2 if max(map(len, labels)) > 30 else 4
        canvas.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=9)
        canvas.savefig(path, dpi=150)


_TRAIN = (
    "accuracy --tasks cnn --treatments paper --densities 0.01 --seeds 1 --folder runs --record rec --syncs {}"
)
_STEP = "step --rate 1gbit --record rec --json step.json --syncs {}"
_TIME = "time-to-accuracy --rate 1gbit --json times.json --syncs {}"
_TRAFFIC = "traffic --json traffic.json --schemes {}"
_SCHEMES = "schemes --models transformer --world 2,4,8,16 --densities 0.01 --json schemes.json --schemes {}"


def _course(shows: str, column: str, axis: str, log: bool = False, smooth: bool = False) -> Kind:
    how = partial(draw.over_steps, column=column, label=axis, log=log, smooth=smooth)
    return Kind(shows, _TRAIN, data.records, how)


_LOSS = _course("Convergence by step", "loss", "training loss", log=True, smooth=True)
_DENSITY = _course("Density over iterations", "density", "elements sent over all", log=True, smooth=True)
_F = _course("f(t) over iterations", "imbalance", "longest selection over the mean", smooth=True)
_WAITING = _course("Norm of the residual", "waiting", "norm of a rank's residual")
_THRESHOLD = _course("Threshold over iterations", "threshold", "threshold", log=True)
_XI = _course("xi of Assumption 1", "xi", "|top-k of the mean - update| / |mean gradient|")
_CONTRACTION = _course("Energy left behind by an exchange", "contraction", "|acc - spent|² / |acc|²")
_RESIDUALS = replace(_LOSS, shows="Convergence by which residuals are collected")
_BREAKDOWN = Kind("Seconds of the exchange by stage", _STEP, data.records, draw.breakdown)
_SECONDS = Kind("Convergence by second", _TIME, data.curves, draw.over_seconds)
_TEAMS = Kind("Time against the number of teams d", _STEP, data.rows, draw.against_teams)
_SELECTION = Kind("Speed-up of selection", _SCHEMES, data.rows, draw.speed_up)
_SCALING = Kind(
    "Time of a step as ranks grow",
    _STEP + " --hosts 2,4,8 --params 12e6",
    data.rows,
    partial(draw.against_ranks, column="step_ms", label="milliseconds a training step"),
)
_WORDS = Kind(
    "Words moved as ranks grow",
    _TRAFFIC,
    data.rows,
    partial(draw.against_ranks, column="words", label="4-byte words moved by the busiest rank in a step"),
)
_GAPS = Kind(
    "Loss against bits",
    "accuracy --tasks transformer --batch 64 --rates 0.5,1,2 --folder runs --json equal.json --syncs {}",
    data.rows,
    draw.gap_against_bits,
)
_HELD_OUT = replace(
    _GAPS,
    command="accuracy --tasks documentation --bits 0.15,0.75 --rates 0.5,1,2 --own-rates --folder runs "
    "--json held-out.json --syncs {}",
)

_RANKS = Kind(
    "Loss above dense's as ranks grow",
    "accuracy --tasks transformer --batch 64 --world 4,16,64 --steps 400 --bits 0.15,0.75,2,4,8 --seeds 1 "
    "--folder runs --json ranks.json --syncs {}",
    data.rows,
    draw.gap_against_ranks,
)
_LIKE = "a figure of the kind in"
_EXDYNA = f"{_LIKE} ExDyna (CCGrid 2024)"
_MICRO = f"{_LIKE} MiCRO (HiPC 2023)"
_DEFT = f"{_LIKE} DEFT (ICPP 2023)"
_OKTOPK = f"{_LIKE} Ok-Topk (PPoPP 2022)"
_SPARDL = f"{_LIKE} SparDL"
_STUDY = "the equal-bytes study"

_ALL = [
    Figure("exdyna-convergence", _EXDYNA, _LOSS, "dense,topk,exdyna-paper,exdyna"),
    Figure("exdyna-density", _EXDYNA, _DENSITY, "topk,hard-threshold,exdyna-paper,exdyna"),
    Figure("exdyna-imbalance", _EXDYNA, _F, "micro-paper,exdyna-paper,exdyna:balance=false,exdyna"),
    Figure("exdyna-breakdown", _EXDYNA, _BREAKDOWN, "topk,micro-paper@paper,exdyna-paper@paper,exdyna"),
    Figure("exdyna-scaling", _EXDYNA, _WORDS, "topk,micro-paper,exdyna-paper,exdyna"),
    Figure("micro-convergence", _MICRO, _LOSS, "dense,topk,micro-paper,micro"),
    Figure("micro-density", _MICRO, _DENSITY, "topk,hard-threshold,micro-paper,micro"),
    Figure("micro-threshold", _MICRO, _THRESHOLD, "exdyna-paper,micro-paper,micro"),
    Figure("micro-residual", _MICRO, _WAITING, "topk,cltk,micro-paper,micro"),
    Figure("deft-convergence", _DEFT, _LOSS, "dense,topk,deft-paper,deft"),
    Figure("deft-density", _DEFT, _DENSITY, "topk-union,deft-paper,deft"),
    Figure("deft-residual", _DEFT, _WAITING, "topk,cltk,deft-paper,deft"),
    Figure("deft-selection", _DEFT, _SELECTION, "topk,deft-paper,deft,micro-paper"),
    Figure("deft-breakdown", _DEFT, _BREAKDOWN, "topk,cltk,deft-paper@paper,deft"),
    Figure("oktopk-xi", _OKTOPK, _XI, "topk,oktopk-paper,oktopk"),
    Figure("oktopk-selection", _OKTOPK, _DENSITY, "gaussiank,oktopk-paper,oktopk"),
    Figure("oktopk-scaling", _OKTOPK, _SCALING, "dense,topk,oktopk-paper@paper,oktopk"),
    Figure("oktopk-convergence", _OKTOPK, _SECONDS, "dense,topk,oktopk-paper@paper,oktopk"),
    Figure("spardl-teams", _SPARDL, _TEAMS, "spardl,spardl:teams=2,spardl:teams=4"),
    Figure(
        "spardl-residuals",
        _SPARDL,
        _RESIDUALS,
        "spardl-paper,spardl-paper:residuals=end,spardl-paper:residuals=local",
    ),
    Figure("spardl-contraction", _SPARDL, _CONTRACTION, "topk,oktopk-paper,spardl-paper,spardl"),
    Figure("spardl-breakdown", _SPARDL, _BREAKDOWN, "topk,oktopk-paper@paper,spardl-paper@paper,spardl"),
    Figure("spardl-convergence", _SPARDL, _SECONDS, "dense,oktopk-paper@paper,spardl-paper@paper,spardl"),
    Figure("study-equal-bytes", _STUDY, _GAPS, "dense,local-sgd:every=64,diloco:every=9+values=int4,cser"),
    Figure("study-held-out", "the held-out task", _HELD_OUT, "dense,stripes,streaming,muloco"),
    Figure("study-ranks", _STUDY, _RANKS, "dense,stripes"),
]
FIGURES = {figure.name: figure for figure in _ALL}


def named(name: str) -> Figure:
    if name not in FIGURES:
        raise ConfigError(f"there is no figure {name!r}: see gradsieve figure --list")
    return FIGURES[name]


def listing() -> str:
    """Return every figure, its source and how its data are made."""
    return "\n\n".join(
        f"{figure.name}\n  {figure.kind.shows}, {figure.source}\n  {figure.command}\n"
        f"  gradsieve figure {figure.name} {_files(figure)} --out {figure.name}.png"
        for figure in _ALL
    )


def _files(figure: Figure) -> str:
    return (
        "rec/*.jsonl" if figure.kind.read is data.records else figure.command.split("--json ")[1].split()[0]
    )
