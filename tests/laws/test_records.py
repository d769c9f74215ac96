"""Records outlive restarts and full disks, and end no training."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gradsieve.record_file import RecordFile
from gradsieve_tools.cli.main import main
from gradsieve_tools.records import Header, numbered, read, text_of
from gradsieve_tools.report.gathered import gather
from gradsieve_tools.watch.follow import Folder
from unit.recorded import HEADER, line_of, plain


def header_of(life: int, **changes: Any) -> Header:
    return replace(HEADER, began=f"life {life}", **changes)


def write(path: Path, life: int, first: int, last: int, torn: bool = False, **changes: Any) -> None:
    """One life. A step's loss says in which life it was taken; its clock starts at 0."""
    file = RecordFile(path, plain(header_of(life, **changes)))
    for step in range(first, last + 1):
        line = line_of(step)
        line.at, line.loss = 0.1 * (step - first + 1), float(life)
        file.write(plain(line))
    file.close()
    if torn:
        with path.open("a") as raw:
            raw.write(text_of(line_of(last + 1))[:50])


def losses(path: Path) -> dict[int, float | None]:
    return {line.step: line.loss for line in read(path).lines}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rec" / "run.rank0.jsonl"


def test_a_training_that_is_started_again_goes_on_in_its_record(path: Path) -> None:
    write(path, 1, 1, 40)
    write(path, 2, 31, 50)
    assert losses(path) == {step: 1.0 if step <= 30 else 2.0 for step in range(1, 51)}
    at = [line.at for line in read(path).lines]
    assert at == sorted(at)
    assert at[-1] == pytest.approx(4.0 + 2.0), "with the time of the ten steps that were lost"


def test_a_training_that_is_begun_anew_is_shown_alone(path: Path) -> None:
    write(path, 1, 1, 40)
    write(path, 2, 1, 20)
    assert losses(path) == dict.fromkeys(range(1, 21), 2.0)
    assert read(path).lines[0].at == pytest.approx(0.1)


@pytest.mark.parametrize(
    "change",
    [
        {"scheme": "exdyna"},
        {"exchange": "gradients"},
        {"density": 0.1},
        {"world": 4},
        {"parameters": 2000},
        {"period": 30},
        {"budget": "auto"},
    ],
)
def test_another_training_is_not_mixed_in(
    path: Path, change: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    write(path, 1, 1, 10)
    before = path.read_bytes()
    write(path, 2, 11, 20, **change)
    assert losses(path) == dict.fromkeys(range(11, 21), 2.0)
    [(number, aside)] = numbered(path)
    assert (number, aside.read_bytes()) == (1, before)
    assert f"it was moved to {aside.name}" in caplog.text
    assert str(next(iter(change))) in caplog.text


def test_a_torn_line_ends_its_life_with_a_sentence(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(path, 1, 1, 10, torn=True)
    assert list(losses(path)) == list(range(1, 11))
    assert "line 12 was not finished (a full disk, or a kill)" in caplog.text
    write(path, 2, 11, 20, torn=True)
    assert losses(path) == {step: 1.0 if step <= 10 else 2.0 for step in range(1, 21)}
    (training,) = gather([path])
    said = " ".join(training.notes)
    assert "was started again once" in said
    assert "A line of rank 0 was not finished" in said
    assert "rank 0 ends in the middle of a line" in said


def test_a_look_follows_lives(path: Path) -> None:
    folder = Folder(path.parent)
    write(path, 1, 1, 10)
    folder.look()
    write(path, 2, 6, 30)
    folder.look()
    ((rank,),) = folder.trainings()
    steps, at = [line.step for line in rank.lines], [line.at for line in rank.lines]
    assert (steps, at) == (sorted(set(steps)), sorted(at))
    assert steps[-1] == 30
    write(path, 3, 1, 2, world=4)
    folder.look()
    ((rank,),) = folder.trainings()
    assert ([line.step for line in rank.lines], rank.header.world) == ([1, 2], 4)


@contextlib.contextmanager
def small_disk(place: Path, size: str) -> Iterator[Path]:
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
    if os.geteuid() or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def fill(path: Path) -> None:
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as film:
        while film.write(b"x" * 512):
            pass


def test_a_full_disk_is_told_once_and_recording_goes_on_when_there_is_room(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    with small_disk(tmp_path / "disk", "64k") as disk:
        path = disk / "run.rank0.jsonl"
        file = RecordFile(path, plain(header_of(1)))
        for step in range(1, 5):
            file.write(plain(line_of(step)))
        fill(disk / "film")
        for step in range(5, 41):
            file.write(plain(line_of(step)))
        assert not path.read_bytes().endswith(b"\n"), "the last line is torn"
        assert [text for text in caplog.messages if "No space left on device" in text] == caplog.messages
        assert len(caplog.messages) == 1
        (reached,) = {line.step for line in read(path).lines[-1:]}
        assert 4 <= reached < 40
        (disk / "film").unlink()
        for step in range(41, 51):
            file.write(plain(line_of(step)))
        file.close()
        kept = [*range(1, reached + 1), *range(41, 51)]
        assert list(losses(path)) == kept
        assert [line.at for line in read(path).lines] == pytest.approx([0.1 * step for step in kept])
        caplog.clear()
        fill(disk / "film")
        write(path, 2, 51, 90)
        assert caplog.text.count("No space left on device") == 1, "nor does it keep one from starting"
        (disk / "film").unlink()
        write(path, 3, 51, 60)
        assert list(losses(path)) == [*kept, *range(51, 61)]
        assert main(["watch", str(disk), "--once"]) == 0
        assert "not read" not in (shown := capsys.readouterr().out)
        assert "60" in shown
        assert main(["report", str(path), "-o", str(tmp_path / "page.html")]) == 0
        assert "was not finished" in (tmp_path / "page.html").read_text()
