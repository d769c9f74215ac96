"""The picture of the house in the docs is what the code says."""

from __future__ import annotations

import shutil
from pathlib import Path

import architecture
from architecture import ROOT


def test_the_picture_is_up_to_date() -> None:
    assert architecture.PICTURE.read_text() == architecture.drawn(ROOT), "python tools/architecture.py"


def test_every_room_has_a_layer() -> None:
    assert architecture.missing(ROOT) == []


def test_a_room_that_nobody_drew_is_found(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "src", tmp_path / "src")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "src" / "gradsieve" / "cellar.py").write_text('"""Nobody knows it."""\n')
    assert architecture.missing(tmp_path) == ["cellar"]
    errors = tmp_path / "src" / "gradsieve" / "errors.py"
    errors.write_text('"""Something else."""\n')
    assert architecture.drawn(tmp_path) != architecture.PICTURE.read_text()
