"""The vote on a checkpoint: a message of an earlier save that comes again is none. `lab chaos` found it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gradsieve.comm import lockstep
from gradsieve.errors import MismatchError
from gradsieve.integrations import folder, shard_folder


def sync(rank: int, step: int) -> Any:
    return SimpleNamespace(
        engine=SimpleNamespace(rank=rank), pipeline=SimpleNamespace(step=step), device=torch.device("cpu")
    )


def votes(steps: list[int]) -> list[str]:
    told = folder._told
    return lockstep.run([told(sync(rank, step), bytes([rank] * 32), None) for rank, step in enumerate(steps)])


def votes_of_hosts(written: list[bool], steps: list[int]) -> None:
    hosts = enumerate(zip(written, steps, strict=True))
    told = shard_folder._told
    lockstep.run([told(sync(host, step), good, "host 0 could not") for host, (good, step) in hosts])


def test_a_word_of_an_earlier_save_is_refused_and_its_rank_named() -> None:
    with pytest.raises(
        MismatchError, match=r"rank 0, step 60: nothing was saved.*: rank 2 of step 58 answered"
    ):
        votes([60, 60, 58])


def test_words_of_one_step_are_all_ranks_hashes() -> None:
    assert votes([2**40] * 3) == [bytes([0] * 32 + [1] * 32 + [2] * 32).hex()] * 3


@pytest.mark.parametrize(
    ("written", "steps", "said"),
    [([True] * 3, [60, 60, 58], "rank 2 of step 58 answered"), ([False, True, True], [60] * 3, "could not")],
)
def test_a_manifest_over_shards_that_not_all_hosts_know_of_is_refused(
    written: list[bool], steps: list[int], said: str
) -> None:
    with pytest.raises(MismatchError, match=said):
        votes_of_hosts(written, steps)


def test_a_manifest_over_shards_that_all_hosts_know_of_is_one() -> None:
    votes_of_hosts([True] * 3, [60] * 3)
