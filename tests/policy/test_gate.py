"""A test that takes long turns the gate red, unless it says why or is left to the night."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

TESTS = """
import time

import pytest

def test_slow():
    time.sleep(1)

def test_slow_with_a_reason():
    '''Slow: it sleeps.'''
    time.sleep(1)

@pytest.mark.nightly
def test_nightly():
    time.sleep(1)
"""


def run(folder: Path, *arguments: str) -> str:
    (folder / "test_it.py").write_text(TESTS)
    program = ["-m", "pytest", "-q", "-c", ROOT / "pyproject.toml", "-o", "slowest=0.01", "-p", "conftest"]
    argv = [sys.executable, *program, "-p", "no:cacheprovider", *arguments, folder]
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=120).stdout


def test_a_slow_test_without_a_reason_is_red_in_the_gate(tmp_path: Path) -> None:
    said = run(tmp_path, "-m", "not nightly")
    assert "1 failed, 1 passed, 1 deselected" in said
    assert "it took 1 s, more than 0.01" in said


def test_elsewhere_it_is_not(tmp_path: Path) -> None:
    assert "3 passed" in run(tmp_path)
