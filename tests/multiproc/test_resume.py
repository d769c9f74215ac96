"""A training resumed in new processes goes on bit for bit; a checkpoint of something else is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from gradsieve.errors import Malformed
from multiproc.harness import Ranks
from multiproc.resumable import Resumable
from multiproc.training import Plan, Run, differing, snapshot, usual, without_rank

every_scheme = pytest.mark.parametrize("scheme", usual())
every_lossy_scheme = pytest.mark.parametrize("scheme", usual(lossless=False))
HALF = 21
"""Odd: every second step leaves gradients that the next exchange tells of."""


class Learning(Resumable):
    """With momentum, in several units."""

    def __init__(self, rank: int, scheme: str) -> None:
        sgd = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
        super().__init__(rank, sgd, scheme=scheme, density=0.02)
        assert len(self.sync.pipeline.units) > 1


def uninterrupted(rank: int, scheme: str) -> dict[str, Tensor]:
    return Learning(rank, scheme).train(0, 2 * HALF)


def first_half(rank: int, scheme: str, folder: Path) -> None:
    """As docs/checkpoints.md says: the model by one rank, all else in a folder."""
    learning = Learning(rank, scheme)
    learning.train(0, HALF)
    if rank == 0:
        torch.save(learning.model.state_dict(), folder / "model.pt")
    torch.save(learning.optimizer.state_dict(), folder / f"{rank}.pt")
    learning.sync.save(folder / "sync")


def second_half(rank: int, scheme: str, folder: Path, with_sync: bool = True) -> dict[str, Tensor]:
    learning = Learning(rank, scheme)
    learning.model.load_state_dict(torch.load(folder / "model.pt", weights_only=True))
    if with_sync:
        learning.sync.load(folder / "sync")
    else:
        learning.optimizer.load_state_dict(torch.load(folder / f"{rank}.pt", weights_only=True))
    return learning.train(HALF, 2 * HALF)


@pytest.fixture(scope="module")
def later() -> Any:
    """Processes that did not take part in the first half."""
    with Ranks(2) as ranks:
        yield ranks


@every_scheme
def test_a_resumed_training_goes_on_bit_for_bit(
    two: Ranks, later: Ranks, scheme: str, tmp_path: Path
) -> None:
    whole = two.run(uninterrupted, scheme)
    two.run(first_half, scheme, tmp_path)
    resumed = later.run(second_half, scheme, tmp_path)
    assert not set(two.pids()) & set(later.pids())
    for rank in range(2):
        assert any(name.startswith("optimizer/") for name in whole[rank])
        assert differing(whole[rank], resumed[rank]) == []


Stored = dict[str, Any]


def of_the_other_rank(stored: Stored, other: Stored, prefix: str) -> Stored:
    return other


def of_another_world(stored: Stored, other: Stored, prefix: str) -> Stored:
    return {**stored, prefix + "world": torch.tensor(3)}


def of_another_scheme(stored: Stored, other: Stored, prefix: str) -> Stored:
    return {**stored, prefix + "scheme": torch.tensor(list(b"Dense"), dtype=torch.uint8)}


def with_a_transposed_residual(stored: Stored, other: Stored, prefix: str) -> Stored:
    return {**stored, prefix + "residual/tensors.3": torch.zeros(100, 40)}


REFUSALS = {
    of_the_other_rank: "saved by another rank",
    of_another_world: r"3 ranks saved this checkpoint and 2 load it|has shape \(3,\), expected \(4,\)",
    of_another_scheme: "of scheme Dense",
    with_a_transposed_residual: r"has shape \(100, 40\), expected \(40, 100\)",
}


def load_spoilt(rank: int, spoil: Callable[..., Stored]) -> tuple[str | None, list[str]]:
    """The refusal, and what the attempt changed."""
    run = Run(rank, Plan("exdyna")).train()
    gathered: list[Any] = [None, None]
    torch.distributed.all_gather_object(gathered, run.sync.state_dict())
    before, refusal = snapshot(run), None
    try:
        run.sync.load_state_dict(spoil(gathered[rank], gathered[1 - rank], f"rank{rank}/"))
    except Malformed as error:
        refusal = str(error)
    return refusal, differing(before, snapshot(run))


@pytest.mark.parametrize("spoil", REFUSALS, ids=lambda spoil: spoil.__name__)
def test_what_is_not_this_ranks_checkpoint_is_refused_and_changes_nothing(
    two: Ranks, spoil: Callable[..., Stored]
) -> None:
    for refusal, changed in two.run(load_spoilt, spoil):
        assert refusal is not None, "accepted"
        assert re.search(REFUSALS[spoil], refusal), refusal
        assert changed == []


def save_with_dcp(rank: int, scheme: str, folder: str) -> dict[str, Tensor]:
    run = Run(rank, Plan(scheme)).train()
    dcp.save({"sync": run.sync}, checkpoint_id=folder)
    return without_rank(run.sync.state_dict(), rank)


def load_with_dcp(rank: int, scheme: str, folder: str) -> dict[str, Tensor]:
    run = Run(rank, Plan(scheme))
    dcp.load({"sync": run.sync}, checkpoint_id=folder)
    return without_rank(run.sync.state_dict(), rank)


@every_lossy_scheme
def test_a_distributed_checkpoint_keeps_the_residuals_of_all_ranks(
    two: Ranks, later: Ranks, scheme: str, tmp_path: Path
) -> None:
    saved = two.run(save_with_dcp, scheme, str(tmp_path))
    loaded = later.run(load_with_dcp, scheme, str(tmp_path))
    residuals = [name for name in saved[0] if name.startswith("residual/")]
    assert set(residuals) <= set(differing(saved[0], saved[1])), "ranks with equal residuals show nothing"
    for rank in range(2):
        assert differing(saved[rank], loaded[rank]) == []


def load_anothers_with_dcp(rank: int, folder: str) -> tuple[str, list[str]]:
    run = Run(rank, Plan("stripes"))
    before = run.sync.state_dict()
    with pytest.raises((Malformed, CheckpointException), match="rank") as refusal:
        dcp.load({"sync": run.sync}, checkpoint_id=folder)
    return str(refusal.value), differing(before, run.sync.state_dict())


def test_a_distributed_checkpoint_of_another_number_of_ranks_is_refused_with_what_to_do(
    pool: Callable[[int], Ranks], two: Ranks, tmp_path: Path
) -> None:
    """Fewer: by the sync. More: by DCP itself, which finds no key of the new ranks."""
    two.run(save_with_dcp, "stripes", str(tmp_path / "two"))
    ((said, changed),) = pool(1).run(load_anothers_with_dcp, str(tmp_path / "two"))
    assert "2 ranks saved this checkpoint and 1 load it" in said
    assert "load with sync.load(folder)" in said
    assert changed == []
    pool(1).run(save_with_dcp, "stripes", str(tmp_path / "one"))
    for said, changed in two.run(load_anothers_with_dcp, str(tmp_path / "one")):
        assert "rank1/" in said
        assert changed == []


def parts_of(learning: Learning) -> dict[str, Any]:
    """As docs/checkpoints.md says: every rank's optimizer under a key of its own."""
    optimizer = get_optimizer_state_dict(learning.model, learning.optimizer)
    return {
        "model": learning.model.state_dict(),
        "sync": learning.sync,
        f"optimizer of rank {learning.rank}": optimizer,
    }


def first_half_with_dcp(rank: int, folder: str) -> None:
    learning = Learning(rank, "stripes")
    learning.train(0, HALF)
    dcp.save(parts_of(learning), checkpoint_id=folder)


def second_half_with_dcp(rank: int, folder: str) -> dict[str, Tensor]:
    learning = Learning(rank, "stripes")
    parts = parts_of(learning)
    sync, parts["sync"] = learning.sync, learning.sync.state_dict()
    dcp.load(parts, checkpoint_id=folder)
    learning.model.load_state_dict(parts["model"])  # first: what waits belongs to the model that is loaded
    set_optimizer_state_dict(learning.model, learning.optimizer, parts[f"optimizer of rank {rank}"])
    sync.load_state_dict(parts["sync"])
    return learning.train(HALF, 2 * HALF)


def test_a_distributed_checkpoint_with_every_ranks_optimizer_goes_on_bit_for_bit(
    two: Ranks, later: Ranks, tmp_path: Path
) -> None:
    whole = two.run(uninterrupted, "stripes")
    two.run(first_half_with_dcp, str(tmp_path))
    resumed = later.run(second_half_with_dcp, str(tmp_path))
    for rank in range(2):
        assert differing(whole[rank], resumed[rank]) == []
