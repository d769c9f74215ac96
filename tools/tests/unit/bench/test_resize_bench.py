"""`bench resize`: ranks of another number go on where the others stopped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from gradsieve.checkpoint import rank_state
from gradsieve.errors import ConfigError
from gradsieve_tools.bench import resize
from tiny_task import TASK, tiny  # noqa: F401  # a fixture


def measured(ways: Sequence[Sequence[int]], batch: int = 24) -> list[dict[str, Any]]:
    return resize.measure_all(TASK, "exdyna", {"density": 0.1}, ways, 2, 18, batch, lambda *_: None)


@pytest.mark.usefixtures("tiny")
def test_what_waits_is_kept_and_a_way_without_a_change_is_one_training() -> None:
    same, changed = measured([[4], [4, 2, 3]])
    assert same["kept"] == 0.0
    assert 0.0 < changed["kept"] < 1e-5
    assert [row["ranks"] for row in (same, changed)] == ["4", "4-2-3"]
    assert len(changed["finals"]) == changed["seeds"] == 2
    assert all(0.0 <= final <= 1.0 for final in changed["finals"])


@pytest.mark.usefixtures("tiny")
def test_what_is_lost_on_the_way_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twin."""
    monkeypatch.setattr(
        rank_state, "ranks_to_sum", lambda rank, world, old: range(rank, min(old, world), world)
    )
    (row,) = measured([[4, 2]])
    assert row["kept"] > 0.1


@pytest.mark.usefixtures("tiny")
def test_a_step_that_cannot_be_shared_evenly_is_refused() -> None:
    with pytest.raises(ConfigError, match="choose --batch"):
        measured([[4, 3]], batch=16)
