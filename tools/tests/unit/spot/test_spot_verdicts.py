"""Verdicts on `gradsieve lab spot` see what they are there for, and its schedules come from their seed."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from gradsieve.checkpoint.files import Manifest, as_text
from gradsieve_tools.spot.campaign import KINDS, Fault, Verdict, by_chance, damage, one_by_one


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "step-000050"
    folder.mkdir()
    contents = [b"of rank 0", b"of rank 1"]
    files = tuple(f"{len(content)} {hashlib.sha256(content).hexdigest()}" for content in contents)
    manifest = Manifest(1, 1, 1, 2, 50, "Stripes", "ab" * 32, True, "", files)
    for rank, content in enumerate(contents):
        (folder / manifest.file_of(rank)).write_bytes(content)
    (folder / manifest.token.manifest).write_text(as_text(manifest))
    return folder


def test_a_whole_checkpoint_is_not_damaged(checkpoint: Path) -> None:
    assert damage(checkpoint) == ""


def test_damage_is_seen_and_named(checkpoint: Path) -> None:
    (second,) = checkpoint.glob("rank00001*")
    second.write_bytes(b"of rank 7")
    assert "the file of rank 1 is not what" in damage(checkpoint)
    second.unlink()
    assert "No such file" in damage(checkpoint)
    (checkpoint / "manifest-1.1.json").write_text("{}")
    assert damage(checkpoint) != ""


def test_a_checkpoint_of_another_step_is_seen(checkpoint: Path) -> None:
    moved = checkpoint.rename(checkpoint.with_name("step-000100"))
    assert damage(moved) == "step-000100 is of step 50"


def test_a_bit_or_a_checkpoint_too_few_is_no_good_end() -> None:
    good = Verdict([Fault("node", 1.0)], checkpoints=3, digest="a1", undisturbed="a1")
    assert good.is_good
    assert not Verdict([], checkpoints=3, digest="a1", undisturbed="a2").is_good
    assert not Verdict([], checkpoints=3, digest="a1 a2", undisturbed="a1").is_good
    assert not Verdict([], checkpoints=0, digest="a1", undisturbed="a1").is_good
    assert not Verdict([], checkpoints=3, damaged=["x"], digest="a1", undisturbed="a1").is_good


def test_schedules_come_from_their_seed() -> None:
    assert by_chance(3, 24, 100) == by_chance(3, 24, 100) != by_chance(4, 24, 100)
    assert {fault.kind for fault in by_chance(3, 24, 100)} == set(KINDS)
    assert all(0 < fault.at < 864 for fault in by_chance(3, 24, 100))
    kinds = [fault.kind for fault in one_by_one(1, 20, 6)]
    assert (kinds.count("worker"), kinds.count("node")) == (20, 6)
    assert kinds != [fault.kind for fault in one_by_one(2, 20, 6)]
