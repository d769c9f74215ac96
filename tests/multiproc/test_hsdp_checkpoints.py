"""A sharded training goes on bit for bit, and on other numbers of hosts and shards with all that waited."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

import gradsieve
from gradsieve.checkpoint import files
from gradsieve.parallel.hsdp import add_residual
from multiproc.harness import Ranks
from multiproc.sharded import Training, full
from multiproc.training import differing

HALF = 7
"""Odd: every second step leaves gradients that the next exchange tells of."""


@pytest.fixture(scope="module")
def folder(four: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training of two hosts with two shards each, saved half way; saved twice, as trainings do."""
    path = tmp_path_factory.mktemp("hsdp")
    four.run(first_half, path)
    return path


def first_half(rank: int, path: Path) -> None:
    training = Training(bits=1.0)
    training.train(0, HALF - 2)
    training.sync.save(path / "sync")
    training.train(HALF - 2, HALF)
    training.sync.save(path / "sync")
    dcp.save({"sync": training.sync}, checkpoint_id=path / "dcp")
    torch.save(training.sync.replica.optimizer_state(training.optimizer), path / f"optimizer{rank}.pt")
    shown = training.shown()
    training.sync.flush()
    dcp.save({"model": training.model.state_dict()}, checkpoint_id=path / "flushed")
    complete = full(training.model)
    if rank == 0:
        torch.save({"shown": shown, "complete": complete}, path / "expected.pt")


def uninterrupted(rank: int) -> dict[str, Tensor]:
    training = Training(bits=1.0)
    training.train(0, 2 * HALF)
    return training.all_of_it()


def second_half(rank: int, path: Path, way: str) -> dict[str, Tensor]:
    training = Training(bits=1.0)
    if way == "folder":
        training.sync.load(path / "sync")
    else:
        if way == "dcp":
            dcp.load({"sync": training.sync}, checkpoint_id=path / "dcp")
        stored = torch.load(path / f"optimizer{rank}.pt", weights_only=True)
        training.sync.replica.set_optimizer_state(training.optimizer, stored)
    training.train(HALF, 2 * HALF)
    return training.all_of_it()


@pytest.fixture(scope="module")
def whole(four: Ranks) -> list[dict[str, Tensor]]:
    return four.run(uninterrupted)


@pytest.mark.parametrize(("way", "good"), [("folder", True), ("dcp", True), ("optimizer alone", False)])
def test_a_resumed_training_goes_on_bit_for_bit(
    four: Ranks, folder: Path, whole: list[dict[str, Tensor]], way: str, good: bool
) -> None:
    """The last is a twin."""
    resumed = four.run(second_half, folder, way)
    assert [differing(*pair) == [] for pair in zip(whole, resumed, strict=True)] == [good] * 4


def test_of_two_checkpoints_the_last_is_kept(folder: Path) -> None:
    names = sorted(path.name for path in (folder / "sync").iterdir())
    assert [name[:25] for name in names] == [
        *("manifest-1.2.json", "manifest.json"),
        *(f"rank{rank:05}-shard{shard:05}-1.2-" for rank in range(2) for shard in range(2)),
        "term-1",
    ]


def saved_twice_in_a_period(rank: int, path: Path) -> tuple[int, int, str]:
    """The second time host 0 cannot write the manifest over the shards, as if it had been killed before."""
    training = Training(bits=1.0, exchange=gradsieve.Steps(every=4))
    training.train(0, 6)
    training.sync.save(path)
    before = training.sync.pipeline.step, training.sync.pipeline.since
    training.train(6, 7)
    assert training.sync.pipeline.step == before[0], "an exchange came in between"
    with mock.patch.object(files, "_commit", side_effect=OSError("killed")):
        try:
            training.sync.save(path)
            said = ""
        except gradsieve.RefusedError as error:
            said = str(error)
    other = Training(bits=1.0, exchange=gradsieve.Steps(every=4))
    other.sync.load(path)
    return *before, f"{other.sync.pipeline.step} {other.sync.pipeline.since} {said}"


def test_two_saves_between_two_exchanges_have_folders_of_their_own(four: Ranks, tmp_path: Path) -> None:
    for step, since, found in four.run(saved_twice_in_a_period, tmp_path):
        assert found.startswith(f"{step} {since} "), "what was saved first"
        assert "nothing was saved" in found


# -- other numbers ------------------------------------------------------------------------------------


def on_one_host(rank: int, path: Path) -> list[dict[str, Tensor]]:
    """Four shards and nobody to exchange with."""
    out = []
    for way in ("what waits", "flushed"):
        training = Training(1, 4, attached=False)
        if way == "what waits":
            add_residual(training.model, path / "sync")
        else:
            state = training.model.state_dict()
            dcp.load({"model": state}, checkpoint_id=path / "flushed")
            training.model.load_state_dict(state)
        out.append(training.shown())
        training.train(HALF, HALF + 2)
        assert all(bool(each.isfinite().all()) for each in training.shown().values())
    return out


def test_two_by_two_goes_on_as_one_by_four_with_all_that_waited(four: Ranks, folder: Path) -> None:
    expected = torch.load(folder / "expected.pt", weights_only=True)
    assert differing(expected["shown"], expected["complete"]), "nothing waited"
    for added, flushed in four.run(on_one_host, folder):
        assert differing(flushed, expected["complete"]) == []
        for name, each in expected["complete"].items():
            assert torch.allclose(added[name], each, atol=1e-6), name


def on_four_hosts(rank: int, path: Path) -> list[Any]:
    training = Training(4, 1, bits=1.0)
    training.sync.load(path / "sync")
    shown = training.shown()
    second = [memory["exp_avg_sq"]._local_tensor.clone() for memory in training.optimizer.state.values()]
    training.sync.flush()
    complete = training.shown()
    training.train(HALF, HALF + 2)
    training.sync.verify()
    return [shown, complete, second]


def test_two_by_two_goes_on_as_four_by_one(four: Ranks, folder: Path) -> None:
    expected = torch.load(folder / "expected.pt", weights_only=True)
    old = [torch.load(folder / f"optimizer{rank}.pt", weights_only=True)["state"] for rank in range(4)]
    for rank, (shown, complete, second) in enumerate(four.run(on_four_hosts, folder)):
        assert differing(shown, expected["shown"]) == []
        for name, each in expected["complete"].items():
            assert torch.allclose(complete[name], each, atol=1e-6), name
        host = rank % 2  # whose optimizer it took, from both shards
        for index, found in enumerate(second):
            parts = [old[2 * host + shard][index]["exp_avg_sq"] for shard in range(2)]
            assert torch.equal(found, torch.cat(parts))


# -- refusals -----------------------------------------------------------------------------------------


def loads_damaged(rank: int, path: Path) -> tuple[str, bool]:
    training = Training(bits=1.0)
    training.train(0, 2)
    before = training.all_of_it()
    with pytest.raises(gradsieve.GradsieveError) as error:
        training.sync.load(path / "sync")
    return str(error.value), differing(before, training.all_of_it()) == []


def test_damage_in_one_shard_is_refused_on_all_ranks(four: Ranks, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    (victim,) = (tmp_path / "copy" / "sync").glob("rank00001-shard00001-*")
    content = bytearray(victim.read_bytes())
    content[-1] ^= 1
    victim.write_bytes(content)
    seen = four.run(loads_damaged, tmp_path / "copy")
    assert [untouched for _, untouched in seen] == [True] * 4
    assert "SHA-256 is another than the manifest's" in seen[3][0]
    for said, _ in seen:
        assert "nothing was loaded" in said
        assert "shard 1 refused" in said or "shard00001" in said


def saves_badly(rank: int, path: Path) -> str:
    training = Training(bits=1.0)
    training.train(0, 2)
    training.sync.save(path)
    training.train(2, 4)
    if rank == 3:
        (path / "rank00001-shard00001-1.2.part").mkdir()  # where a file should be
    dist.barrier()
    with pytest.raises(gradsieve.GradsieveError) as error:
        training.sync.save(path)
    before = Training(bits=1.0)
    before.sync.load(path)
    assert before.sync.pipeline.step == 2
    return str(error.value)


def test_a_shard_that_cannot_be_saved_leaves_the_checkpoint_before(four: Ranks, tmp_path: Path) -> None:
    said = four.run(saves_badly, tmp_path / "sync")
    assert all("IsADirectoryError" in each for each in said), said


def registered_for_checkpointing(rank: int) -> str:
    """As Accelerate asks for a registered object's state: from a module of that name."""
    training, theirs = Training(bits=1.0), {"__name__": "accelerate.checkpointing"}
    exec("def save_custom_state(obj): return obj.state_dict()", theirs)  # noqa: S102 - a function of theirs
    try:
        theirs["save_custom_state"](training.sync)  # type: ignore[operator]
    except gradsieve.ConfigError as error:
        return str(error)
    return "nothing was noticed"


def test_a_sync_of_shards_that_accelerate_would_save_is_refused(four: Ranks) -> None:
    for rank, said in enumerate(four.run(registered_for_checkpointing)):
        assert said.startswith(f"rank {rank // 2}, step 0: register_for_checkpointing(sync) saves one rank's")
