"""The picture of the house in the docs is what the code says."""

from __future__ import annotations

import shutil
from pathlib import Path

import architecture
from architecture import ROOT


def copied(target: Path) -> None:
    for place in architecture.PACKAGES.values():
        shutil.copytree(ROOT / place, target / place, ignore=shutil.ignore_patterns("__pycache__"))


def test_no_module_imports_itself_by_way_of_others() -> None:
    graph = architecture.imports(ROOT)
    assert len(graph) > 300, "modules of both packages"
    assert architecture.circles(graph) == []


def test_a_circle_is_found_also_one_of_types(tmp_path: Path) -> None:
    copied(tmp_path)
    replica = tmp_path / "src" / "gradsieve" / "replica.py"
    breach = "if TYPE_CHECKING:\n    from gradsieve.sync import GradientSync\n"
    replica.write_text(f"{replica.read_text()}\n{breach}")
    found = architecture.circles(architecture.imports(tmp_path))
    assert {"gradsieve.replica", "gradsieve.sync"} <= set(found)


def test_the_picture_is_up_to_date() -> None:
    assert architecture.PICTURE.read_text() == architecture.drawn(ROOT), "python scripts/architecture.py"


def test_every_room_has_a_layer() -> None:
    assert architecture.missing(ROOT) == []


def test_a_room_that_nobody_drew_is_found(tmp_path: Path) -> None:
    copied(tmp_path)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "src" / "gradsieve" / "cellar.py").write_text('"""Nobody knows it."""\n')
    assert architecture.missing(tmp_path) == ["cellar"]
    errors = tmp_path / "src" / "gradsieve" / "errors.py"
    errors.write_text('"""Something else."""\n')
    assert architecture.drawn(tmp_path) != architecture.PICTURE.read_text()


def without_package(tests: Path, package: Path) -> list[str]:
    """Folders of unit tests that are named after no package."""
    folders = (each for each in tests.iterdir() if each.is_dir() and each.name != "__pycache__")
    return sorted(each.name for each in folders if not (package / each.name / "__init__.py").is_file())


def test_unit_tests_lie_as_what_they_test() -> None:
    tools = ROOT / "tools"
    assert without_package(ROOT / "tests" / "unit", ROOT / "src" / "gradsieve") == []
    assert without_package(tools / "tests" / "unit", tools / "src" / "gradsieve_tools") == []


def test_tests_of_a_package_that_is_gone_are_found(tmp_path: Path) -> None:
    (tmp_path / "comm").mkdir()
    (tmp_path / "integrations").mkdir()
    assert without_package(tmp_path, ROOT / "src" / "gradsieve") == ["integrations"]
