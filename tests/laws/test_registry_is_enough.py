"""One registry line gets a scheme tested: a toy is registered in another pytest, and its laws run there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from gradsieve.schemes import SCHEMES
from laws.cases import published, registered

TESTS = Path(__file__).parents[1]
PLUGIN = """
import sys
sys.path.insert(0, {tests!r})
from gradsieve.schemes import SCHEMES
from laws import toys
SCHEMES["sound-toy"] = toys.Toy
SCHEMES["broken-toy"] = toys.LosesMass
"""


def test_a_scheme_is_held_to_the_laws_merely_by_being_registered(tmp_path: Path) -> None:
    (tmp_path / "register_toys.py").write_text(PLUGIN.format(tests=str(TESTS)))
    laws = [
        "spent_adds_up_to_update_exactly",
        "no_gradient_is_lost_over_a_run_of_whole",
        "drained_to_the_end",
    ]
    plugins = ["-p", "register_toys", "-p", "no:cacheprovider", "-p", "no:xdist"]
    options = ["-q", "-rA", "--tb=no", "-o", "addopts=", "-k", f"toy and ({' or '.join(laws)})"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *plugins, *options, str(TESTS / "laws" / "test_laws.py")],
        capture_output=True,
        text=True,
        cwd=TESTS.parent,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        timeout=200,
        check=False,
    )
    lines = done.stdout.splitlines()
    sound = [line for line in lines if "[sound-toy]" in line]
    broken = [line for line in lines if "[broken-toy]" in line]
    assert len(sound) == len(laws), done.stdout + done.stderr
    assert all(line.startswith("PASSED") for line in sound), done.stdout
    assert [line.split()[0] for line in broken if "exactly" in line] == ["FAILED"], done.stdout
    assert [line.split()[0] for line in broken if "no_gradient_is_lost" in line] == ["FAILED"], done.stdout


def test_only_the_scheme_that_never_communicates_is_excepted() -> None:
    assert set(SCHEMES) - set(registered()) - set(published()) == {"noop"}
