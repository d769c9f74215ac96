"""The vote on a checkpoint: a message of an earlier save that comes again is none. `lab chaos` found it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch

from gradsieve.checkpoint import files
from gradsieve.checkpoint.fencing import FencingToken
from gradsieve.checkpoint.files import VotePhase
from gradsieve.comm import lockstep
from gradsieve.errors import DivergenceError, MismatchError

TOKEN = FencingToken(1, 4)


def replica(rank: int, step: int) -> Any:
    return SimpleNamespace(
        rank=rank,
        pipeline=SimpleNamespace(step=step),
        device=torch.device("cpu"),
        where=f"rank {rank}, step {step}",
        shard=0,
        shards_of_host=1,
    )


def held_by(rank: int, models: Mapping[int, float]) -> dict[str, torch.Tensor]:
    """1.0, unless it is said there."""
    return {"layer.bias": torch.zeros(2), "layer.weight": torch.tensor([models.get(rank, 1.0)])}


def votes(
    steps: list[int],
    tokens: list[FencingToken] | None = None,
    models: Mapping[int, float] = MappingProxyType({}),
    phases: Mapping[int, VotePhase] = MappingProxyType({}),
) -> list[torch.Tensor]:
    ranks = enumerate(zip(steps, tokens or [TOKEN] * len(steps), strict=True))
    return lockstep.run(
        [
            files._vote(
                replica(rank, step),
                token,
                phases.get(rank, VotePhase.MANIFEST),
                files.FileInfo(10 + rank, bytes([200 + rank] * 32)),
                held_by(rank, models),
            )
            for rank, (step, token) in ranks
        ]
    )


def test_a_word_of_an_earlier_save_is_refused_and_its_rank_named() -> None:
    with pytest.raises(
        MismatchError, match=r"rank 0, step 60: nothing was saved.*: rank 2 of step 58 answered"
    ):
        votes([60, 60, 58])


def test_so_is_one_of_another_save_in_the_same_step() -> None:
    with pytest.raises(MismatchError, match="rank 1 of step 60 answered"):
        votes([60] * 3, [TOKEN, FencingToken(1, 3), TOKEN])


def test_so_is_the_vote_before_in_the_same_save() -> None:
    """Fault 1,675 of `lab chaos --faults 2000 --seed 5`: its fingerprint was taken for another state."""
    with pytest.raises(MismatchError, match=r"rank 2 of step 60 answered\. A message of an earlier"):
        votes([60] * 3, phases={2: VotePhase.FILES})


def test_a_damaged_fingerprint_in_a_vote_that_has_none_is_named() -> None:
    """Fault 577 of the same run."""
    with pytest.raises(MismatchError, match="a rank's vote was damaged on its way"):
        votes([60] * 3, models={1: 2.0})


def test_words_of_one_step_are_all_ranks_sizes_and_hashes() -> None:
    expected = [f"{10 + rank} {bytes([200 + rank] * 32).hex()}" for rank in range(3)]
    for rows in votes([2**40] * 3):
        assert [files._listed(row) for row in rows.tolist()] == expected


def test_ranks_that_hold_different_models_save_nothing_and_say_what_differs() -> None:
    phases = dict.fromkeys(range(3), VotePhase.FILES)
    with pytest.raises(DivergenceError, match=r"ranks \[1\], in 1 of 2 tensors \(layer.weight\)"):
        votes([60] * 3, models={1: 1.0 + 2**-20}, phases=phases)


def test_a_damaged_token_is_found_out_in_the_vote(tmp_path: Path) -> None:
    """Fault 330: all ranks believed a term 2^46 too large, and every later save of the run was refused."""
    ranks = [replica(rank, 60) for rank in range(3)]
    damaged = FencingToken(TOKEN.term + 2**46, TOKEN.number)
    (tmp_path / "term-1").touch()
    for rank, each in enumerate(ranks):
        each.engine, each.tokens = SimpleNamespace(run=lambda program, *_: damaged), {str(tmp_path): (1, 3)}
        each.found = files.agreed_token(each, tmp_path)
        assert each.found == (TOKEN if rank == 0 else damaged)
    with pytest.raises(MismatchError, match="rank 1 of step 60, rank 2 of step 60 answered"):
        votes([60] * 3, [each.found for each in ranks])
