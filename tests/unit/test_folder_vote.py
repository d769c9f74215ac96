"""The vote on a checkpoint: a message of an earlier save that comes again is none. `lab chaos` found it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gradsieve.comm import lockstep
from gradsieve.errors import MismatchError
from gradsieve.integrations.folder import _told


def votes(steps: list[int]) -> list[str]:
    def sync(rank: int, step: int) -> Any:
        return SimpleNamespace(
            engine=SimpleNamespace(rank=rank), pipeline=SimpleNamespace(step=step), device=torch.device("cpu")
        )

    return lockstep.run(
        [_told(sync(rank, step), bytes([rank] * 32), None) for rank, step in enumerate(steps)]
    )


def test_a_word_of_an_earlier_save_is_refused_and_its_rank_named() -> None:
    with pytest.raises(
        MismatchError, match=r"rank 0, step 60: nothing was saved.*: rank 2 of step 58 answered"
    ):
        votes([60, 60, 58])


def test_words_of_one_step_are_all_ranks_hashes() -> None:
    assert votes([2**40] * 3) == [bytes([0] * 32 + [1] * 32 + [2] * 32).hex()] * 3
