"""Compilers for GPUs take every launch of a Triton kernel, and need neither stack nor spills for it.

In processes of their own: the interpreter, which other tests use, knows more than a GPU does. Triton keeps
what it compiled: about a minute of two cores at first, seconds from then on.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed: pip install --no-deps triton")

ROOT = Path(__file__).parents[3]
SCRIPTS, PACKAGE = ROOT / "scripts", ROOT / "src" / "gradsieve" / "kernels"
MODULES = ["triton_passes", "triton_low_bit"]
TARGETS = {"sm_75", "sm_80", "sm_90", "sm_100", "sm_120", "gfx90a", "gfx942"}
# An element, in float32. Parameters in two bytes are read for two fewer, and written for two fewer.
BYTES = {"_apply": 28.0, "_rebase": 20.0, "_waiting": 12.0}
MOST_REGISTERS = 64  # with so many, half of the threads that a processor can hold are there at once


def run(*argv: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(SCRIPTS), environment.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, *argv], capture_output=True, text=True, env=environment, check=False
    )


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_every_launch_compiles_for_every_gpu_without_stack_spills_or_inexact_arithmetic(
    tmp_path: Path,
) -> None:
    ran = run(SCRIPTS / "kernel_table.py", "--json", tmp_path / "table.json")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    rows = json.loads((tmp_path / "table.json").read_text())["results"]
    assert {row["launch"].split()[0] for row in rows} == launched()
    for row in rows:
        assert row["registers"].keys() == TARGETS
        assert max(row["registers"].values()) <= MOST_REGISTERS, row
    check_bytes(rows)


def launched() -> set[str]:
    """All kernels that the package starts somewhere."""
    sources = [(PACKAGE / f"{module}.py").read_text() for module in MODULES]
    return {name for source in sources for name in re.findall(r"(\w+)\[\(", source)}


def check_bytes(rows: list[dict[str, Any]]) -> None:
    """As the instructions move them: nothing is read twice."""
    seen = set()
    for row in rows:
        kernel, _, own, out, *_ = row["launch"].split()
        if (size := row.get("bytes an element")) is None:
            continue
        narrow = 0 if own == "*fp32" else 2 * (1 + (kernel == "_rebase"))
        if kernel == "_waiting" and out != "*fp32":
            narrow += 2
        assert size == BYTES[kernel] - narrow, row
        seen.add((kernel, own))
    assert len(seen) == 3 * len(BYTES)


def test_what_a_kernel_must_not_have_is_found() -> None:
    ran = run(Path(__file__).with_name("planted_kernels.py"), "sm_80", "gfx942")
    found = [re.sub(r"\d+ ", "", line) for line in ran.stdout.splitlines()]
    stack, inexact, barriers = "bytes of stack, spills", "inexact operations", "barriers"
    wanted = [
        *(f"{stack} on sm_80: _hoard", f"{inexact} on sm_80: _fuse", f"{barriers} on sm_80: _apply"),
        "bytes at once on sm_80: _narrow aligned=True",  # AMD's are not looked at
        f"{inexact} on sm_80: _divide",  # AMD's is correct
        *(f"{stack} on gfx942: _hoard", f"{inexact} on gfx942: _fuse", f"{barriers} on gfx942: _apply"),
    ]
    assert found == wanted, ran.stderr
