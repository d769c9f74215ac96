"""The tutorial, word for word: its script, its three lines, torchrun on two hosts of a lab."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from documents import ROOT, Block, blocks, commands
from gradsieve_tools.emulation import Lab
from processes import SOURCE

pytestmark = pytest.mark.lab

TUTORIAL = list(blocks(ROOT / "docs" / "tutorial.md"))


def titled(name: str, language: str) -> Block:
    (found,) = (block for block in TUTORIAL if name in block.title and block.language == language)
    return found


def with_lines_of(diff: str, script: str) -> str:
    """The script with the added lines of a diff, each after the line that stands before it there."""
    before = ""
    for line in diff.splitlines():
        if line.startswith("+ "):
            assert script.count(before + "\n") == 1, before
            script = script.replace(before + "\n", f"{before}\n{line[2:]}\n")
        elif line.strip() != "...":
            before = line[2:]
    return script


def test_two_hosts_train_with_the_three_lines(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = with_lines_of(titled("train_sparse.py", "diff").text, titled("train.py", "python").text)
    assert script.count("sync") == 2
    (tmp_path / "train_sparse.py").write_text(script)
    (typed,) = (
        words
        for block in TUTORIAL
        for words in commands(block)
        if words[:3] == ["gradsieve", "lab", "run"] and words[-1].endswith("train_sparse.py")
    )
    rate = typed[typed.index("--rate") + 1]
    before = Path.cwd()
    os.chdir(tmp_path)
    try:
        with Lab(hosts=2, rate=rate) as lab:
            command = typed[typed.index("--") + 1 :]
            environment = {"STEPS": "10", "OMP_NUM_THREADS": "1", "PYTHONPATH": SOURCE}
            assert lab.run(command, timeout=240, env=environment) == [0, 0]
    finally:
        os.chdir(before)
    assert re.search(r"accuracy 0\.\d+, \d+ ms a step", capfd.readouterr().out)
