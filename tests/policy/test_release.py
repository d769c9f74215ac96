"""`scripts/release.py` builds nothing where versions, changelog, tree or tag do not fit: each is seen."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import release

ROOT = Path(__file__).parents[2]
CHANGELOG = "# Changelog\n\n## 1.2.3 - 2026-11-18\n\n### Added\n- A word.\n\n## 1.2.2 - 2026-11-01\n"


def git(root: Path, *words: str) -> None:
    who = (
        "-c",
        "user.name=a",
        "-c",
        "user.email=a@b",
        "-c",
        "tag.gpgSign=false",
        "-c",
        "commit.gpgSign=false",
    )
    subprocess.run(["git", "-C", str(root), *who, *words], check=True, capture_output=True)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """What is looked at, of this tree but for the version, in a repository of its own."""
    ours = re.findall(release.PLACES["CITATION.cff"], (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    for place in release.PLACES:
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text((ROOT / place).read_text().replace(ours[0], "1.2.3"))
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    git(tmp_path, "init", "-q")
    commit(tmp_path)
    return tmp_path


def commit(tree: Path) -> None:
    git(tree, "add", ".")
    git(tree, "commit", "-q", "--allow-empty", "-m", "all")


def test_a_tree_that_fits_has_no_fault(tree: Path) -> None:
    assert release.faults(tree, "v1.2.3") == []


@pytest.mark.parametrize(
    ("becomes", "said"),
    [
        ("# Changelog\n", "begins with '## '"),
        (CHANGELOG.replace("1.2.3", "1.2.4"), "begins with '## 1.2.4 - 2026-11-18'"),
        (CHANGELOG.replace("## 1.2.3", "## Unreleased\n- More.\n\n## 1.2.3"), "begins with '## Unreleased'"),
        (CHANGELOG.replace("- A word.\n", ""), "says nothing about 1.2.3"),
    ],
)
def test_a_changelog_without_the_entry_is_seen(tree: Path, becomes: str, said: str) -> None:
    (tree / "CHANGELOG.md").write_text(becomes)
    commit(tree)
    [fault] = release.faults(tree, "v1.2.3")
    assert said in fault


def test_a_fault_ends_the_command_before_anything_is_built(
    monkeypatch: pytest.MonkeyPatch, tree: Path
) -> None:
    monkeypatch.setattr(release, "ROOT", tree)
    monkeypatch.setattr("sys.argv", ["release.py", "v1.2.4"])
    with pytest.raises(SystemExit, match=r"and not 1\.2\.4"):
        release.main()
    assert not (tree / "dist").exists()
