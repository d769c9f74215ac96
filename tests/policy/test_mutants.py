"""Every mutant can still be applied: its function, text and test exist. `just mutants` runs them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import mutants
import pytest

ALL = mutants.read()


def test_every_mutant_can_be_applied() -> None:
    assert mutants.faults(ALL) == []
    assert len(ALL) >= 15


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"instead": "", "text": "no such text"}, "occurs 0 times"),
        ({"instead": "", "text": "\n"}, "times in"),
        ({"instead": "return ("}, "was never closed"),
        ({"patch": "gradsieve.no_such_module:f"}, "occurs 0 times"),
        ({"patch": "gradsieve.pipeline.tags:no_such_function"}, "occurs 0 times"),
        ({"test": "tests/unit/pipeline/test_tags.py::test_no_such_test"}, "there is no test"),
    ],
)
def test_one_that_cannot_is_seen(change: dict[str, str], said: str) -> None:
    [fault] = mutants.faults([replace(ALL[0], **change)])
    assert said in fault


def test_a_body_is_replaced_in_the_function_that_is_named(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.py").write_text(
        source := "def f():\n    return 0\nclass A:\n    def f(self):\n        return 1\n"
    )
    (tmp_path / "test_a.py").write_text("def test_f(): ...")
    mutant = mutants.Mutant("m", "a:A.f", "test_a.py::test_f", instead="return 2")
    assert mutant.changed(tmp_path).source == source.replace("return 1", "return 2")


def test_two_of_one_name_are_seen() -> None:
    assert "two have this name" in mutants.faults([ALL[0], ALL[0]])[0]


@pytest.mark.parametrize(
    ("code", "verdict"), [(1, "killed"), (0, "SURVIVED"), (2, "NO VERDICT"), (5, "NO VERDICT")]
)
def test_only_a_failing_test_kills(
    code: int, verdict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant = mutants.Changed("m", "a.py", "1 / 0", "test_a.py")
    path = tmp_path / mutant.file
    path.write_text("1 / 1")
    seen = []
    monkeypatch.setattr(mutants, "run_tests", lambda *_: seen.append(path.read_text()) or code)
    assert mutants.try_out(mutant, tmp_path).startswith(verdict)
    assert [*seen, path.read_text()] == ["1 / 0", "1 / 1"]
