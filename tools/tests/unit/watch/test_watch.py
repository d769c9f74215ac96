"""`gradsieve watch`: one frame, and whatever a folder looks like while a job writes to it."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gradsieve_tools.cli.main import main
from gradsieve_tools.records import text_of
from gradsieve_tools.watch.follow import WINDOW, Folder
from unit.recorded import line_of, write


def once(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["watch", str(folder), "--once"]) == 0
    return capsys.readouterr().out


def test_a_frame_says_how_it_goes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "rec")
    out = once(tmp_path / "rec", capsys, monkeypatch)
    words = {line.split("  ")[0].strip(): line.split() for line in out.splitlines()}
    assert words["step"][1] == "40"
    assert words["steps/s"][1] == "10"
    assert words["loss"][1] == "0.025"
    assert words["bits a parameter"][3] == "0.51"
    assert words["density"][1] == "0.03"
    assert words["imbalance f(t)"][2] == "3"
    assert words["age of the residual, steps"][5] == "12"
    assert words["norm of the residual"][4] == "4"
    assert "select 2 ms" in out
    assert "exchange 25 ms" in out
    assert "waited 30 ms a step" in out
    assert "rank 2: the others wait for it 30 ms a step (30%)" in out


def test_half_lines_foreign_files_and_silent_ranks_are_survived(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = write(tmp_path / "rec")
    with paths[0].open("a") as file:
        file.write(text_of(line_of(41))[:33])
    (tmp_path / "rec" / "other\x1b[2J.jsonl").write_text("[red]no record\n")
    old = time.time() - 100
    os.utime(paths[1], (old, old))
    out = once(tmp_path / "rec", capsys, monkeypatch)
    assert "silent    rank 1: last step 40, 100 s ago" in out
    assert "rank 0: last step" not in out
    assert "not read: other[2J.jsonl" in out
    assert "\x1b[2J" not in out


def test_a_folder_is_followed(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "rec")
    folder.look()
    assert folder.trainings() == []
    paths = write(tmp_path / "rec", steps=WINDOW + 5)
    folder.look()
    ((first, *_),) = folder.trainings()
    assert (len(first.lines), first.lines[-1].step) == (WINDOW, WINDOW + 5)
    with paths[0].open("a") as file:
        file.write(text_of(line_of(WINDOW + 6)))
    folder.look()
    assert first.lines[-1].step == WINDOW + 6
    paths[0].unlink()
    write(tmp_path / "rec", steps=3)
    folder.look()
    assert [len(rank.lines) for rank in folder.trainings()[0]] == [3, 3, 3], "started again"


def test_q_ends_it_and_leaves_the_terminal_as_it_was(tmp_path: Path) -> None:
    write(tmp_path / "rec")
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from rich.console import Console\n"
        "from gradsieve_tools.cli import watch\n"
        "from gradsieve_tools.watch.follow import Folder\n"
        "sys.exit(watch._live(Folder(Path(sys.argv[1])), Console(), 30.0))\n"
    )
    ours, theirs = pty.openpty()
    job = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "rec")],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm"},
    )
    seen = b""
    try:
        deadline = time.monotonic() + 30
        while b"slowest" not in seen and time.monotonic() < deadline:
            if select.select([ours], [], [], 0.2)[0]:
                seen += os.read(ours, 65536)
        assert b"slowest" in seen, seen[-2000:]
        os.write(ours, b"q")
        assert job.wait(10) == 0
    finally:
        job.kill()
        job.wait()
        os.close(ours)
        os.close(theirs)
