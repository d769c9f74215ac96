"""`gradsieve figure`: every figure can be drawn, from the files that its command makes and from no others."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gradsieve.errors import ConfigError
from gradsieve_tools.bench.figures.catalogue import FIGURES, Figure
from gradsieve_tools.bench.figures.data import Row
from gradsieve_tools.bench.figures.draw import gap_against_bits
from gradsieve_tools.cli.main import main, parsed
from gradsieve_tools.records import Header, Line, path_of, text_of

HEADER = Header(
    name="a", scheme="exdyna", exchange="gradients", density=0.1, rank=0, world=2, parameters=9, every=1
)


def a_record(folder: Path, name: str, scheme: str, rank: int = 0, **more: Any) -> Path:
    header = replace(HEADER, name=name, scheme=scheme, rank=rank)
    figures = {"threshold": 1.0, "imbalance": 1.5, "waiting": 2.0, "contraction": 0.5, "xi": 0.3, "loss": 1.0}
    lines = [
        Line(step=step, at=float(step), density=0.1, bits=1.0, seconds={"select": 0.1}, **{**figures, **more})
        for step in range(1, 9)
    ]
    lines.append(Line(step=9, at=9.0, density=1.0, bits=32.0))  # a flush
    path = path_of(folder / name, rank)
    path.write_text("".join(map(text_of, [header, *lines])))
    return path


@pytest.fixture
def files(tmp_path: Path) -> dict[str, list[Path]]:
    """By the kind of reader."""
    rows = [
        {"scheme": scheme, "sync": scheme, "world": world, "words": 10.0, "select_ms": 2.0, "step_ms": 5.0}
        | {"gap": 1.0, "bits": 0.5, "budget": 0.5, "batch": 64}
        for scheme in ("topk", "dense", "spardl", "spardl:teams=2")
        for world in (2, 4)
    ]
    curve = {"metric": "loss", "steps": [1, 2], "seconds": [0.5, 1.0], "values": [3.0, None]}
    times = [{"sync": "dense", "runs": [{"curve": curve}]}]
    for name, content in (("rows", rows), ("curves", times)):
        (tmp_path / f"{name}.json").write_text(json.dumps({"config": {}, "rows": content}))
    trainings = [a_record(tmp_path, "a", "exdyna"), a_record(tmp_path, "b", "dense")]
    return {"records": trainings} | {name: [tmp_path / f"{name}.json"] for name in ("rows", "curves")}


KINDS = {id(figure.kind): figure for figure in FIGURES.values()}


@pytest.mark.parametrize("figure", KINDS.values(), ids=lambda figure: figure.name)
def test_a_figure_of_every_kind_is_drawn(
    figure: Figure, files: dict[str, list[Path]], tmp_path: Path
) -> None:
    out = tmp_path / "figure.png"
    figure.plot(files[figure.kind.read.__name__], out)
    assert out.read_bytes().startswith(b"\x89PNG")


def test_the_list_has_all_five_papers_and_commands_that_parse(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["figure", "--list"]) == 0
    reported = capsys.readouterr().out
    assert len(FIGURES) >= 14
    assert {name.partition("-")[0] for name in FIGURES} == {
        *("exdyna", "micro", "deft", "oktopk", "spardl"),
        "study",
    }
    for figure in FIGURES.values():
        assert f"{figure.name}\n  {figure.kind.shows}, {figure.source}\n  {figure.command}\n" in reported
        words = shlex.split(figure.command)
        parsed(words[1:])  # exits where a command does not exist


def test_a_figure_without_what_it_shows_is_refused(tmp_path: Path) -> None:
    path = a_record(tmp_path, "a", "topk", xi=None)
    with pytest.raises(ConfigError, match="none of the files has xi"):
        FIGURES["oktopk-xi"].plot([path], tmp_path / "figure.png")
    for arguments in (["nosuch", str(path), "--out", "x.png"], [], ["oktopk-xi"], ["oktopk-xi", str(path)]):
        assert main(["figure", *arguments]) == 2


def drawn(*rows: Row) -> list[tuple[float, float]]:
    """The line of the one sync, against bits."""
    from matplotlib.figure import Figure as Canvas

    axes = Canvas().add_subplot()
    gap_against_bits(axes, rows)
    (line,) = [each for each in axes.lines if len(each.get_xdata()) == 2 and each.get_marker() == "o"]
    return list(zip(line.get_xdata(), line.get_ydata(), strict=True))
