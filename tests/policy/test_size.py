"""The library stays as small as it is, and trains to the same bits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.mark.parametrize(
    "command",
    [["closure.py", "--limit"], ["files_of_a_step.py", "--limit"], ["ten_trainings.py"]],
    ids=lambda command: command[0],
)
def test_limits_hold(command: list[str]) -> None:
    """Slow: the ten trainings have 60 steps of four ranks each."""
    done = subprocess.run(
        [sys.executable, SCRIPTS / command[0], *command[1:]], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
