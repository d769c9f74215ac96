"""Result files say how they came about; tables line up."""

from __future__ import annotations

import json
import math
import sys
from datetime import datetime
from pathlib import Path

import pytest
import torch

from gradsieve_tools.results import write


def test_a_result_reads_back_as_it_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gradsieve", "bench", "traffic", "--params", "1e6"])
    path = tmp_path / "result.json"
    config = {"params": 1_000_000, "schemes": ["topk"]}
    rows = [{"scheme": "topk", "words": 0.1 + 0.2, "settled_after": None}]
    write(path, config, rows)
    result = json.loads(path.read_text())
    assert list(result) == ["command", "date", "versions", "config", "rows"]
    assert result["config"] == config
    assert result["rows"] == rows
    assert result["command"] == ["gradsieve", "bench", "traffic", "--params", "1e6"]
    assert datetime.fromisoformat(result["date"]).tzinfo is not None
    assert result["versions"]["torch"] == torch.__version__
    assert set(result["versions"]) == {"gradsieve", "torch", "python", "kernel", "cpus"}


def test_nan_is_refused_and_the_old_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    write(path, {}, [])
    before = path.read_text()
    with pytest.raises(ValueError, match="JSON"):
        write(path, {}, [{"words": math.nan}])
    assert path.read_text() == before
