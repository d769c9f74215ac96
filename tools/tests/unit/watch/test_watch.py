"""`gradsieve watch`: one frame, and whatever a folder looks like while a job writes to it."""

from __future__ import annotations

import os
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
