"""FSDP2 inside a host, sparse exchange between hosts: laws on the replicate axis, the shared model."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradsieve
from gradsieve.parallel.hsdp import by_host
from multiproc.harness import Ranks
from multiproc.models import batch
from multiproc.sharded import RATE, Odd, Training, full, mesh_of, plain, sharded, whole_training
from multiproc.training import differing

AMOUNTS: list[dict[str, Any]] = [{"bits": 1.0}, {"scheme": "exdyna", "density": 0.05}]


@pytest.mark.parametrize("amount", AMOUNTS, ids=["bits", "exdyna"])
def test_what_all_ranks_learnt_is_in_the_model_or_waits(four: Ranks, amount: dict[str, Any]) -> None:
    seen = four.run(whole_training, 9, **amount)
    for name in seen[0]["fed"]:
        learnt = -RATE * torch.stack([each["fed"][name] for each in seen]).mean(0)
        assert torch.equal(seen[0]["flushed"][name].double(), learnt), (
            f"{name}: something was lost or made up"
        )
        assert not torch.equal(seen[0]["shown"][name].double(), learnt)
    for each in seen:
        assert bool(each["waits"]["any"])
        assert differing(each["shown"], seen[0]["shown"]) == []
        assert differing(each["flushed"], seen[0]["flushed"]) == []


# -- a training ---------------------------------------------------------------------------------------


def long_training(rank: int) -> list[Any]:
    """With the budget that a user gets who asks for nothing; evaluated now and then, also in mid-step."""
    training = Training()
    said = []
    for ten in range(6):
        training.train(10 * ten, 10 * ten + 10)
        said.append((training.evaluated(), training.shown()))
    training.sync.verify()
    own = {name: each.clone() for name, each in training.sync.replica.models.own.items()}
    return [said, own, training.sync.pipeline.step]


def test_replicas_show_the_same_bits_and_evaluate_them(four: Ranks) -> None:
    seen = four.run(long_training)
    for said, _, steps in seen:
        assert 8 < steps <= 60, "shards chose no period, or another one"
        assert steps == seen[0][2]
        for (out, shown), (first, same) in zip(said, seen[0][0], strict=True):
            assert torch.equal(out, first)
            assert differing(shown, same) == []
    out, shown = seen[0][0][-1]
    assert torch.equal(out, plain(shown)), "FSDP gathered another model than the shared one"
    assert differing(seen[0][1], seen[2][1]), "each host trains a model of its own"


def written_and_loaded(rank: int) -> list[Any]:
    """What the user writes to parameters between steps, and a model that is loaded."""
    training = Training(bits=1.0)
    training.train(0, 5)
    before = training.shown()
    with torch.no_grad():
        for parameter in training.model.parameters():
            parameter.mul_(0.5)
    written = [training.shown(), training.evaluated()]
    training.train(5, 6)
    after = training.shown()
    training.model.load_state_dict({name: each * 0.0 for name, each in training.model.state_dict().items()})
    loaded = [training.shown(), training.evaluated()]
    waits = any(bool(each.any()) for each in training.sync.pipeline.residuals())
    training.train(6, 8)
    training.sync.verify()
    return [before, *written, after, *loaded, waits]


def test_what_is_written_and_loaded_between_steps_is_the_shared_model(four: Ranks) -> None:
    for before, written, said, after, loaded, silent, waits in four.run(written_and_loaded):
        assert torch.equal(said, plain(written))
        for name, each in before.items():
            assert torch.equal(written[name], 0.5 * each)
            assert (after[name] - written[name]).norm() < (after[name] - each).norm(), "it was forgotten"
        assert not any(bool(each.any()) for each in loaded.values())
        assert not silent.any()
        assert not waits


def one_bad_gradient(rank: int) -> tuple[int, list[bool]]:
    """A NaN in rows that one shard of host 1 holds."""
    training = Training(bits=1.0)
    training.train(0, 2)
    before = [local.clone() for local in training.sync.replica.models.own.values()]
    inputs, labels = batch(2, rank)
    training.optimizer.zero_grad()
    nn.functional.cross_entropy(training.model(inputs), labels % 3).backward()
    if rank == 2:
        gradient = training.model.first.weight.grad
        assert gradient is not None
        gradient._local_tensor[0, 0] = torch.nan
    training.sync.runner.complete()
    training.sync.runner.refresh()
    before = [own.clone() for own in training.sync.replica.models.own.values()]
    training.optimizer.step()
    moved = [
        not torch.equal(old, new)
        for old, new in zip(before, training.sync.replica.models.own.values(), strict=True)
    ]
    training.sync.verify()
    return training.sync.pipeline.skipped, moved


def test_a_host_with_a_bad_gradient_in_one_shard_takes_no_part_of_a_step(four: Ranks) -> None:
    seen = four.run(one_bad_gradient)
    assert [skipped for skipped, _ in seen] == [0, 0, 1, 1]
    assert any(seen[0][1])
    assert not any(seen[2][1])
    assert not any(seen[3][1])


def clipped(rank: int) -> tuple[float, float]:
    training = Training(bits=1.0)
    training.train(0, 6)
    nn.functional.cross_entropy(training.model(batch(6, rank)[0]), batch(6, rank)[1] % 3).backward()
    norm = training.sync.clip_grad_norm_(1e-3)
    after = torch.nn.utils.get_total_norm([p.grad for p in training.model.parameters()])
    return float(norm), float(after.full_tensor())


def test_clipping_is_of_all_shards(four: Ranks) -> None:
    seen = four.run(clipped)
    assert seen[0] == seen[1]
    assert seen[2] == seen[3]
    assert all(after == pytest.approx(1e-3, rel=1.0) and norm > 1e-2 for norm, after in seen)


# -- hosts --------------------------------------------------------------------------------------------


def found_hosts(rank: int, names: list[str]) -> list[list[int]]:
    with mock.patch.dict(os.environ, {"GROUP_RANK": names[rank]}):
        mesh = gradsieve.host_mesh("cpu")
    assert mesh["replicate"].size() == 2
    return mesh.mesh.tolist()


def test_hosts_are_found(four: Ranks) -> None:
    assert four.run(found_hosts, ["0", "1", "0", "1"]) == [[[0, 2], [1, 3]]] * 4


def test_hosts_with_unlike_numbers_of_ranks_are_refused() -> None:
    with pytest.raises(gradsieve.ConfigError, match=r"different numbers of ranks \(a 2, b 1\)"):
        by_host(["a/", "a/", "b/"])


# -- refusals -----------------------------------------------------------------------------------------


def refused(rank: int) -> dict[str, str]:
    mesh = mesh_of(2, 2)
    model = sharded(Odd(), mesh["shard"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    untouched = Odd()
    whole = fully_shard(Odd(), mesh=mesh)
    alone = DeviceMesh("cpu", [[each] for each in range(4)], mesh_dim_names=("shard", "replicate"))[
        "replicate"
    ]

    def said(model: Any, replicate: Any, **settings: Any) -> str:
        with pytest.raises(gradsieve.ConfigError) as error:
            gradsieve.attach(model, optimizer, replicate=replicate, **settings)
        return str(error.value)

    ddp = DistributedDataParallel(untouched)
    out = {
        "plain": said(untouched, mesh["replicate"]),
        "ddp": said(ddp, mesh["replicate"]),
        "native": said(whole, mesh["replicate"]),
        "two axes": said(model, mesh),
        "one host": said(model, alone),
        "crooked": said(model, mesh["shard"]),
        "gradients": said(model, mesh["replicate"], scheme="dense"),
        "no axis": said(model, None),
    }
    sync = gradsieve.attach(model, optimizer, replicate=mesh["replicate"], bits=1.0)
    out["twice"] = said(model, mesh["replicate"])
    sync.close()
    gradsieve.attach(model, optimizer, replicate=mesh["replicate"], bits=1.0).close()
    dist.barrier()
    return out


def test_what_cannot_work_is_refused_with_the_mend(four: Ranks) -> None:
    for said in four.run(refused):
        assert "fully_shard(model, mesh=mesh['shard'])" in said["plain"]
        assert "reshard_after_forward=False" in said["ddp"]
        assert "fully_shard(module, mesh=mesh['shard'])" in said["native"]
        assert "not 2 axes" in said["two axes"]
        assert "leave out attach()" in said["one host"]
        assert "hold different shards of one model" in said["crooked"]
        assert "give fully_shard() the whole mesh" in said["gradients"]
        assert "replicate=mesh['replicate']" in said["no axis"]
        assert "close() it" in said["twice"]


def starts_differently(rank: int) -> str:
    mesh = mesh_of(2, 2)
    model = sharded(Odd(), mesh["shard"])
    with torch.no_grad():
        model.first.weight += float(rank == 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        gradsieve.attach(model, optimizer, replicate=mesh["replicate"], bits=1.0)
    except gradsieve.DivergenceError as error:
        return str(error)
    return ""


def test_shards_that_start_unlike_are_named(four: Ranks) -> None:
    said = four.run(starts_differently)
    assert ["first.weight" in each for each in said] == [False, True, False, True]


def nothing_to_hold(rank: int) -> tuple[int, dict[str, Tensor]]:
    """One row, so that shard 1 is empty in all parameters."""
    mesh = mesh_of(2, 2)
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(64, 1), mesh=mesh["shard"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sync = gradsieve.attach(model, optimizer, replicate=mesh["replicate"], bits=0.75)
    for step in range(9):
        optimizer.zero_grad()
        model(torch.full((2, 64), 1.0 + rank + step)).square().mean().backward()
        optimizer.step()
    sync.flush()
    sync.verify()
    return sync.pipeline.step, full(model)


def test_a_rank_that_holds_nothing_takes_part(four: Ranks) -> None:
    seen = four.run(nothing_to_hold)
    assert [steps for steps, _ in seen] == [10] * 4
    assert all(differing(shown, seen[0][1]) == [] for _, shown in seen)
