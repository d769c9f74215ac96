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
