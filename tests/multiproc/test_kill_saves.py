"""A dozen of the kills of `scripts/kill_saves.py`, on DDP; all of them are in docs/promises.md."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import kill_saves
import pytest
import saving_ranks

pytestmark = pytest.mark.skipif(shutil.which("strace") is None, reason="strace is missing")
KILLS = 12


def a_dozen(life: Callable[..., None], place: Path) -> list[kill_saves.Line]:
    """From the first to the last call of rank 0's save."""
    lives = kill_saves.Chain("ddp", place, life)
    names = lives.calls(0)
    places = [(len(names) - 1) * each // (KILLS - 1) for each in range(KILLS)]
    chosen = [(names[at], names[: at + 1].count(names[at])) for at in places]
    # Waits are not always as many: of these a later one may never come.
    return list(lives.kills(0, [call for call in chosen if call[0] != "futex"]))


def test_a_whole_checkpoint_loads_after_a_kill_anywhere_in_a_save(tmp_path: Path) -> None:
    lines = a_dozen(saving_ranks.be_rank, tmp_path)
    assert [line for line in lines if not line.is_good] == []
    assert {line.found for line in lines} == {"first", "second"}, "kills before and after the manifest"
