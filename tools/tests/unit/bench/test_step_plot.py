"""`bench step-plot`: which results go together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gradsieve.errors import ConfigError
from gradsieve_tools.bench.step.plot import read
from gradsieve_tools.cli.main import main

CONFIG = {"workload": "mlp", "hosts": 4, "params": 25_000_000, "density": 0.001, "delay": None}


def result(
    folder: Path, rate: str | None, syncs: tuple[str, ...] = ("noop", "dense", "exdyna"), **other: Any
) -> Path:
    path = folder / f"{rate}-{len(list(folder.iterdir()))}.json"
    rows = [{"sync": sync, "step_ms": 100.0 + 10 * number} for number, sync in enumerate(syncs)]
    path.write_text(json.dumps({"config": {**CONFIG, "rate": rate, **other}, "rows": rows}))
    return path


def test_runs_are_sorted_from_the_slowest_link_to_the_unshaped_one(tmp_path: Path) -> None:
    paths = [result(tmp_path, rate) for rate in (None, "1gbit", "100mbit")]
    runs = read(paths)
    assert [run.rate for run in runs] == [10**8, 10**9, None]
    assert [run.label for run in runs] == ["100mbit", "1gbit", "unshaped"]
    assert runs[0].step_ms == {"noop": 100.0, "dense": 110.0, "exdyna": 120.0}


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"workload": "transformer"}, "differ in workload"),
        ({"hosts": 8, "delay": "5ms"}, "differ in hosts, delay"),
        ({"params": 10}, "differ in params"),
        ({"density": 0.01}, "differ in density"),
        ({"rate": "100mbit"}, "same rate"),
        ({"syncs": ("dense",)}, "no row of noop"),
    ],
)
def test_what_does_not_go_together_is_refused(tmp_path: Path, other: dict[str, Any], said: str) -> None:
    paths = [result(tmp_path, "100mbit"), result(tmp_path, **{"rate": "1gbit", **other})]
    with pytest.raises(ConfigError, match=said):
        read(paths)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"config": {}, "rows": []}', "\x00"])
def test_what_is_no_result_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ConfigError, match=r"x\.json is no result"):
        read([tmp_path / "x.json", tmp_path / "x.json"])


def test_the_command_draws_and_refuses_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = result(tmp_path, "1gbit"), result(tmp_path, None, ("noop", "dense", "exdyna", "topk"))
    out = tmp_path / "step.png"
    assert main(["bench", "step-plot", str(one), str(other), "--plot", str(out)]) == 0
    assert out.read_bytes().startswith(b"\x89PNG")
    assert main(["bench", "step-plot", str(one), "--plot", str(out)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
