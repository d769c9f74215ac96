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
from gradsieve_tools.bench.figures.data import Row, Training, labels, records
from gradsieve_tools.bench.figures.draw import gap_against_bits, gap_against_ranks, running_mean
from gradsieve_tools.cli.main import main, parsed
from gradsieve_tools.records import Header, Line, Record, path_of, text_of

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
    tried = [{"scheme": "auto", "budgets": [[0.0, 1], [0.5, 1], [1.0, 1]]}]
    idle = {"rate": "1gbit", "delay": None, "ahead": True, "spins": False}
    for name, content, config in (("rows", rows, {}), ("curves", times, {}), ("budgets", tried, idle)):
        (tmp_path / f"{name}.json").write_text(json.dumps({"config": config, "rows": content}))
    trainings = [a_record(tmp_path, "a", "exdyna"), a_record(tmp_path, "b", "dense")]
    return {"records": trainings} | {
        name: [tmp_path / f"{name}.json"] for name in ("rows", "curves", "budgets")
    }


KINDS = {id(figure.kind): figure for figure in FIGURES.values()}


@pytest.mark.parametrize("figure", KINDS.values(), ids=lambda figure: figure.name)
def test_a_figure_of_every_kind_is_drawn(
    figure: Figure, files: dict[str, list[Path]], tmp_path: Path
) -> None:
    out = tmp_path / "figure.png"
    figure.plot(files[figure.kind.read.__name__], out)
    assert out.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("figure", KINDS.values(), ids=lambda figure: figure.name)
def test_files_of_another_kind_are_refused(
    figure: Figure, files: dict[str, list[Path]], tmp_path: Path
) -> None:
    others = [paths for kind, paths in files.items() if kind != figure.kind.read.__name__]
    for paths in others:
        arguments = ["figure", figure.name, *map(str, paths), "--out", str(tmp_path / "figure.png")]
        assert main(arguments) == 2
    assert not (tmp_path / "figure.png").exists()


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


def test_a_command_that_does_not_exist_would_be_seen() -> None:
    with pytest.raises(SystemExit):
        parsed(["bench", "accuracy", "--recrod", "rec"])


def test_a_figure_without_what_it_shows_is_refused(tmp_path: Path) -> None:
    path = a_record(tmp_path, "a", "topk", xi=None)
    with pytest.raises(ConfigError, match="none of the files has xi"):
        FIGURES["oktopk-xi"].plot([path], tmp_path / "figure.png")
    for arguments in (["nosuch", str(path), "--out", "x.png"], [], ["oktopk-xi"], ["oktopk-xi", str(path)]):
        assert main(["figure", *arguments]) == 2


def test_ranks_are_averaged_and_a_flush_is_no_density(tmp_path: Path) -> None:
    paths = [a_record(tmp_path, "a", "exdyna", rank, waiting=float(rank)) for rank in range(2)]
    (training,) = records(paths)
    assert training.column("waiting") == (list(range(1, 9)), [0.5] * 8)
    assert training.column("density") == (list(range(1, 9)), pytest.approx([0.1] * 8))
    assert training.stages() == {"select": pytest.approx(0.1)}
    assert training.step_seconds() == 1.0


def test_labels_name_what_differs() -> None:
    def of(**changes: Any) -> Training:
        header = replace(HEADER, **changes)
        return Training(header, [Record(header, [])])

    assert labels([of(), of(name="b", scheme="topk")]) == ["exdyna", "topk"]
    assert labels([of(), of(world=4)]) == ["exdyna, 2 ranks", "exdyna, 4 ranks"]
    assert labels([of(), of(density=0.01)]) == ["exdyna, density 0.1", "exdyna, density 0.01"]
    assert labels([of(), of(name="b")]) == ["a", "b"], "else lines would share a name"


def test_a_running_mean_begins_with_what_there_is() -> None:
    assert running_mean([2.0, 4.0, 6.0, 8.0], 2) == [2.0, 3.0, 5.0, 7.0]
    assert running_mean([2.0, 4.0], 0) == [2.0, 4.0]


def drawn(*rows: Row) -> list[tuple[float, float]]:
    """The line of the one sync, against bits."""
    from matplotlib.figure import Figure as Canvas

    axes = Canvas().add_subplot()
    gap_against_bits(axes, rows)
    (line,) = [each for each in axes.lines if len(each.get_xdata()) == 2 and each.get_marker() == "o"]
    return list(zip(line.get_xdata(), line.get_ydata(), strict=True))


def diloco(every: int, bits: float, gap: float | None, seeds: int = 1) -> Row:
    return Row(f"diloco:every={every}", 4, {"bits": bits, "gap": gap, "seeds": seeds})


def test_of_several_rates_the_best_is_drawn() -> None:
    rates = diloco(9, 0.75, 3.0), diloco(9, 0.75, 1.0), diloco(9, 0.75, None)
    assert drawn(*rates, diloco(36, 0.25, 2.0)) == [(0.25, 2.0), (0.75, 1.0)]


def test_more_seeds_are_drawn_though_fewer_ended_better() -> None:
    seeds = diloco(9, 0.75, 1.0), diloco(9, 0.75, 1.5, seeds=3), diloco(9, 0.75, 1.2)
    assert drawn(*seeds, diloco(36, 0.25, 2.0)) == [(0.25, 2.0), (0.75, 1.5)]


def test_a_setting_that_another_beats_with_as_many_bits_is_not_on_the_line() -> None:
    assert drawn(diloco(8, 0.76, 1.0), diloco(9, 0.72, 3.0), diloco(36, 0.25, 2.0)) == [
        (0.25, 2.0),
        (0.76, 1.0),
    ]


def ranks(world: int, batch: int, gap: float, seeds: int = 1) -> Row:
    return Row("stripes", world, {"budget": 0.75, "batch": batch, "gap": gap, "seeds": seeds})


def test_lines_against_ranks_join_one_batch_in_all_or_one_a_rank() -> None:
    from matplotlib.figure import Figure as Canvas

    axes = Canvas().add_subplot()
    gap_against_ranks(
        axes, [ranks(4, 64, 3.0), ranks(4, 64, 2.5, seeds=3), ranks(16, 64, 9.0), ranks(4, 16, 1.0)]
    )
    lines = {
        line.get_linestyle(): list(zip(line.get_xdata(), line.get_ydata(), strict=True))
        for line in axes.lines
        if line.get_marker() == "o"
    }
    assert lines == {"-": [(4, 2.5), (16, 9.0)], "--": [(4, 1.0), (16, 9.0)]}
    with pytest.raises(ConfigError, match="ranks alone"):
        gap_against_ranks(axes, [ranks(4, 64, 3.0), ranks(16, 32, 9.0)])
