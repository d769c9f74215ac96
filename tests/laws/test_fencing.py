"""What save() has acknowledged can be loaded, whatever a run does that was replaced, or ranks that differ."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gradsieve import DivergenceError, MismatchError, RefusedError
from gradsieve.checkpoint import fencing, files
from gradsieve.checkpoint.fencing import MANIFEST
from gradsieve.frameworks.sidecar import save_into
from laws.crew import Crew, fake_group  # noqa: F401  # a fixture
from laws.test_folder import load, save

SETTINGS: dict[str, Any] = {"scheme": "exdyna", "density": 0.1}


def step_after_loading(folder: Path) -> int:
    with Crew(2, **SETTINGS) as crew:
        load(crew, folder)
        (step,) = {hand.sync.pipeline.step for hand in crew.hands}
        return step


class Sleeper:
    """Stops who writes a manifest, once, until it is woken; and before or after the rename."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, after: bool) -> None:
        self.sleeps, self.wakes, self._after, self._write = (
            threading.Event(),
            threading.Event(),
            after,
            files.write,
        )
        monkeypatch.setattr(files, "write", self.write)

    def write(self, folder: Path, part: str, *rest: Any) -> Any:
        is_first = part.startswith("manifest") and not self.sleeps.is_set()
        if not is_first:
            return self._write(folder, part, *rest)
        done = self._write(folder, part, *rest) if self._after else None
        self.sleeps.set()
        assert self.wakes.wait(30)
        return done or self._write(folder, part, *rest)


def replaced_while_it_sleeps(folder: Path, sleeper: Sleeper) -> list[BaseException | None]:
    """A run that has saved step 3 sleeps in the save of step 5; another takes four from what it finds."""
    with Crew(2, **SETTINGS) as old, Crew(2, **SETTINGS) as new:
        old.train(0, 5)
        saving = old.room.all_of(lambda rank: old.hands[rank].sync.save(folder))
        assert sleeper.sleeps.wait(30)
        load(new, folder)
        save(new.train(3, 7), folder)
        sleeper.wakes.set()
        return [future.exception(timeout=30) for future in saving]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with Crew(2, **SETTINGS) as first:
        save(first.train(0, 3), tmp_path)
    return tmp_path


@pytest.mark.parametrize("after", [False, True], ids=["before the rename", "after the rename"])
def test_a_run_that_was_replaced_while_it_slept_harms_nothing(
    folder: Path, after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = replaced_while_it_sleeps(folder, Sleeper(monkeypatch, after))
    assert all(isinstance(error, RefusedError) for error in errors), errors
    assert "belongs to another run, which came later (term 3, this one has 2)" in str(errors[0])
    assert step_after_loading(folder) == (9 if after else 7), "four steps after what it had loaded"


def test_a_deposed_run_that_saves_again_is_refused_and_the_other_goes_on(folder: Path) -> None:
    with Crew(2, **SETTINGS) as old, Crew(2, **SETTINGS) as new:
        save(old.train(0, 1), folder)
        save(new.train(0, 2), folder)
        errors = old.train(1, 2).errors(lambda hand: hand.sync.save(folder))
        assert all("belongs to another run" in str(error) for error in errors)
        save(new.train(2, 4), folder)
        old.train(2, 3)
    assert step_after_loading(folder) == 4
    assert sorted(name for name in os.listdir(folder) if name.startswith(("term", "manifest"))) == [
        "manifest-3.2.json",
        "manifest.json",
        "term-3",
    ]


def test_a_folder_that_was_emptied_is_claimed_again(tmp_path: Path) -> None:
    held: dict[str, tuple[int, int]] = {}
    assert fencing.next_token(held, tmp_path) == (1, 1)
    assert fencing.next_token(held, tmp_path) == (1, 2)
    (tmp_path / "term-1").unlink()
    assert fencing.next_token(held, tmp_path) == (1, 1)


def test_no_two_writers_have_a_term_however_they_race(tmp_path: Path) -> None:
    terms: list[int] = []
    threads = [threading.Thread(target=lambda: terms.append(fencing.claim(tmp_path))) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(terms) == list(range(1, 17))


@pytest.mark.parametrize("name", ["term-999999999999999", "manifest-999999999999999.1.part"])
def test_a_term_after_which_none_can_come_is_refused_and_not_passed(name: str, folder: Path) -> None:
    """Else the next one had a name that nobody reads: what was acknowledged could not be loaded."""
    (folder / name).touch()
    with Crew(2, **SETTINGS) as crew:
        load(crew, folder)
        errors = crew.train(3, 5).errors(lambda hand: hand.sync.save(folder))
        assert all("after which none can come" in str(error) for error in errors)
        (folder / name).unlink()
        save(crew, folder)
    assert step_after_loading(folder) == 5


class Killed(BaseException):
    """Nothing is tidied up."""


def test_what_a_killed_save_left_is_gone_before_the_next_one_needs_the_room(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = sorted(folder.glob("rank*"))

    def killed(*_: object) -> None:
        raise Killed

    def seen(replica: Any, place: Path, *rest: Any) -> list[int]:
        there.append(sorted(place.glob("rank*")))
        return write(replica, place, *rest)

    write, there = files._write_shard, list[list[Path]]()
    with Crew(2, **SETTINGS) as crew:
        load(crew, folder)
        monkeypatch.setattr(files, "_vote", killed)
        crew.train(3, 5).errors(lambda hand: hand.sync.save(folder))
        monkeypatch.undo()
        assert len(list(folder.glob("rank*"))) == 4
    with Crew(2, **SETTINGS) as crew:
        load(crew, folder)
        monkeypatch.setattr(files, "_write_shard", seen)
        save(crew.train(3, 4), folder)
    assert whole in there, "and the checkpoint before is still there"
    assert step_after_loading(folder) == 4


def test_a_save_that_fails_after_its_manifest_leaves_the_checkpoint_before(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full when the manifest is written for the second time, for whoever looks."""
    write = files.write

    def failing(folder: Path, part: str, pieces: Any, name: Callable[[str], str]) -> Any:
        if name("") == MANIFEST:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(folder, part, pieces, name)

    with Crew(2, **SETTINGS) as crew:
        load(crew, folder)
        monkeypatch.setattr(files, "write", failing)
        errors = crew.train(3, 5).errors(lambda hand: hand.sync.save(folder))
        assert all("nothing was saved" in str(error) for error in errors)
        monkeypatch.undo()
        assert step_after_loading(folder) == 3
        save(crew, folder)
    assert step_after_loading(folder) == 5


def test_a_save_whose_last_vote_fails_is_whole(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message was damaged when all had been written: nothing says so to who loads."""
    votes: list[int] = []
    check = files.check_saves

    def failing(replica: Any, now: Any, others: Any) -> None:
        votes.append(replica.rank)
        if votes.count(replica.rank) == 2:
            raise MismatchError("damaged")
        check(replica, now, others)

    with Crew(2, **SETTINGS) as crew:
        load(crew, folder)
        monkeypatch.setattr(files, "check_saves", failing)
        errors = crew.train(3, 5).errors(lambda hand: hand.sync.save(folder))
        assert all("damaged" in str(error) for error in errors)
    assert step_after_loading(folder) == 5


def flipped(crew: Crew) -> None:
    shared = crew.hands[1].sync.pipeline.kept()["shared/last"]
    shared.view(torch.int32)[0] ^= 1


def test_ranks_whose_shared_models_differ_by_a_bit_save_nothing(folder: Path) -> None:
    with Crew(2, **SETTINGS) as crew:
        load(crew, folder)
        flipped(crew.train(3, 5))
        errors = crew.errors(lambda hand: hand.sync.save(folder))
        assert all(isinstance(error, DivergenceError) for error in errors)
        assert "nothing was saved; the checkpoint before is as it was" in str(errors[0])
        assert "(last)" in str(errors[0])
        there = {path.name for path in folder.iterdir() if path.name.startswith("rank")}
        assert len(there) == 2, "and what was refused is removed"
    assert step_after_loading(folder) == 3


@pytest.fixture
def pairs(tmp_path: Path) -> Iterator[Callable[[str], int]]:
    """Which step is found for a file that says so, after saves of steps 2 and 4, the last not finished."""
    with Crew(2, **SETTINGS) as crew:
        for start, pair in ((0, "aa"), (2, "bb"), (4, "cc")):
            crew.train(start, start + 2)
            crew.everyone(lambda hand, pair=pair: save_into(hand.sync, tmp_path, pair))
        yield lambda pair: files.manifest_of_pair(tmp_path, pair).step


def test_a_framework_finds_what_was_saved_with_its_file(pairs: Callable[[str], int]) -> None:
    assert (pairs("cc"), pairs("bb")) == (6, 4)
    with pytest.raises(
        Exception, match="holds step 6 and step 4 of the training, which was not saved together"
    ):
        pairs("aa")
