"""Every mutant can still be applied: its text is there once, its test exists. `just mutants` runs them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import mutants
import pytest

ROOT = Path(__file__).parents[2]

ALL = mutants.read()


def test_every_mutant_can_be_applied() -> None:
    assert mutants.faults(ALL) == []
    assert len(ALL) >= 15


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"text": "no such text"}, "occurs 0 times"),
        ({"text": "\n"}, "times in"),
        ({"file": "src/no_such_file.py"}, "there is no file"),
        ({"test": "tests/unit/pipeline/test_tags.py::test_no_such_test"}, "there is no test"),
    ],
)
def test_one_that_cannot_is_seen(change: dict[str, str], said: str) -> None:
    [fault] = mutants.faults([replace(ALL[0], **change)])
    assert said in fault


def test_two_of_one_name_are_seen() -> None:
    assert "two have this name" in mutants.faults([ALL[0], ALL[0]])[0]


@pytest.mark.parametrize(
    ("code", "verdict"), [(1, "killed"), (0, "SURVIVED"), (2, "NO VERDICT"), (5, "NO VERDICT")]
)
def test_only_a_failing_test_kills(
    code: int, verdict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / ALL[0].file
    path.parent.mkdir(parents=True)
    path.write_text(before := (ROOT / ALL[0].file).read_text())
    seen = []
    monkeypatch.setattr(mutants, "run_tests", lambda *_: seen.append(path.read_text()) or code)
    assert mutants.try_out(ALL[0], tmp_path).startswith(verdict)
    assert ALL[0].becomes in seen[0]
    assert path.read_text() == before
