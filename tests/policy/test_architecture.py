"""The picture of the house in the docs is what the code says."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def architecture() -> ModuleType:
    spec = importlib.util.spec_from_file_location("architecture", ROOT / "tools" / "architecture.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_picture_is_up_to_date(architecture: ModuleType) -> None:
    assert architecture.PICTURE.read_text() == architecture.drawn(ROOT), "python tools/architecture.py"


def test_every_room_has_a_layer(architecture: ModuleType) -> None:
    assert architecture.missing(ROOT) == []


def test_a_room_that_nobody_drew_is_found(architecture: ModuleType, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "src", tmp_path / "src")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "src" / "gradsieve" / "cellar.py").write_text('"""Nobody knows it."""\n')
    assert architecture.missing(tmp_path) == ["cellar"]
    errors = tmp_path / "src" / "gradsieve" / "errors.py"
    errors.write_text('"""Something else."""\n')
    assert architecture.drawn(tmp_path) != architecture.PICTURE.read_text()
