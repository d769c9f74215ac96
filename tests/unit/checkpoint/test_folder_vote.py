"""The vote on a checkpoint: a message of an earlier save that comes again is none. `lab chaos` found it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gradsieve.checkpoint import files, state
from gradsieve.checkpoint.fencing import FencingToken
from gradsieve.checkpoint.files import VotePhase
from gradsieve.errors import DivergenceError, MismatchError
from laws.virtual_engine import Room, VirtualEngine

TOKEN = FencingToken(1, 4)


def replica(rank: int, step: int, room: Room) -> Any:
    return SimpleNamespace(
        rank=rank,
        world=room.world,
        pipeline=SimpleNamespace(step=step),
        device=torch.device("cpu"),
        where=f"rank {rank}, step {step}",
        shard=0,
        shards_of_host=1,
        of_all_shards=lambda row: row.unsqueeze(0),
        engine=VirtualEngine(room, rank),
    )


@pytest.fixture
def room() -> Iterator[Room]:
    room = Room(3)
    yield room
    room.close()


def vote(each: Any, token: FencingToken = TOKEN, phase: VotePhase = VotePhase.MANIFEST) -> torch.Tensor:
    return files._vote(each, token, phase, [10 + each.rank], None)


def test_a_word_of_an_earlier_save_is_refused_and_its_rank_named(room: Room) -> None:
    with pytest.raises(
        MismatchError, match=r"rank 0, step 60: nothing was saved.*: rank 2 of step 58 answered"
    ):
        room.everyone(lambda rank: vote(replica(rank, 58 if rank == 2 else 60, room)))


def test_so_is_one_of_another_save_in_the_same_step(room: Room) -> None:
    with pytest.raises(MismatchError, match="rank 1 of step 60 answered"):
        room.everyone(lambda rank: vote(replica(rank, 60, room), FencingToken(1, 3 if rank == 1 else 4)))


def test_so_is_the_vote_before_in_the_same_save(room: Room) -> None:
    """Fault 1,675 of `lab chaos --faults 2000 --seed 5`: its fingerprint was taken for another state."""
    phases = VotePhase.MANIFEST, VotePhase.MANIFEST, VotePhase.FILES
    with pytest.raises(MismatchError, match=r"rank 2 of step 60 answered\. A message of an earlier"):
        room.everyone(lambda rank: vote(replica(rank, 60, room), phase=phases[rank]))


def test_words_of_one_step_are_given_to_all_ranks(room: Room) -> None:
    for rows in room.everyone(lambda rank: vote(replica(rank, 2**40, room))):
        assert rows.tolist() == [[[10], [11], [12]]]


def test_ranks_that_hold_different_models_save_nothing_and_say_what_differs(room: Room) -> None:
    def compare(rank: int) -> None:
        weight = torch.tensor([1.0 + (rank == 1) * 2**-20])
        digests = torch.tensor([[1, 2, 1]])
        models = {"layer.bias": torch.zeros(2), "layer.weight": weight}
        files._refuse_different(replica(rank, 60, room), digests, models)

    with pytest.raises(DivergenceError, match=r"ranks \[1\], in 1 of 2 tensors \(layer.weight\)"):
        room.everyone(compare)


def test_a_damaged_token_is_found_out_in_the_vote(
    room: Room, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault 330: all ranks believed a term 2^46 too large, and every later save of the run was refused."""
    (tmp_path / "term-1").touch()
    damaged = FencingToken(TOKEN.term + 2**46, TOKEN.number)
    with monkeypatch.context() as patched:
        patched.setattr(state, "vote", lambda *_: torch.tensor([[damaged] * 3]))
        found = []
        for rank in range(3):
            each = replica(rank, 60, room)
            each.tokens = {str(tmp_path): (1, 3)}
            found.append(files.agreed_token(each, tmp_path))
    assert found == [TOKEN, damaged, damaged]
    with pytest.raises(MismatchError, match="rank 1 of step 60, rank 2 of step 60 answered"):
        room.everyone(lambda rank: vote(replica(rank, 60, room), found[rank]))
