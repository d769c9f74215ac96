"""A save or a load that is refused is an answer: real ranks train on as if it had not been asked for."""

from __future__ import annotations

import errno
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

import gradsieve
from gradsieve.checkpoint import files
from multiproc.harness import Ranks
from multiproc.resumable import Resumable
from multiproc.training import differing

FULL = OSError(errno.ENOSPC, "No space left on device")


def learning(rank: int) -> Resumable:
    return Resumable(rank, partial(torch.optim.SGD, lr=0.05, momentum=0.9), bits=1.0)


def refused(rank: int, folder: Path, what: str) -> tuple[str, dict[str, Tensor]]:
    """Rank 1's disk is full, or nobody's checkpoint is there. What was said, and how it went on."""
    training = learning(rank)
    training.train(0, 4)
    disk = mock.patch.object(files, "_write_shard", side_effect=FULL) if rank == 1 else mock.MagicMock()
    try:
        if what == "save":
            with disk:
                training.sync.save(folder / "next")
        elif what == "load":
            training.sync.load(folder / "is not there")
        said = ""
    except gradsieve.RefusedError as error:
        said = str(error)
    end = training.train(4, 8)
    training.sync.save(folder / "next")
    return said, end


@pytest.mark.parametrize("what", ["save", "load"])
def test_after_a_refusal_all_ranks_train_on_and_save(two: Ranks, what: str, tmp_path: Path) -> None:
    usual = two.run(refused, tmp_path, "nothing")
    for (_, undisturbed), (said, end) in zip(usual, two.run(refused, tmp_path, what), strict=True):
        assert "No space left on device" in said or "No such file" in said
        assert differing(undisturbed, end) == []
    assert files.read_manifest(tmp_path / "next").step == 8


def of_another_release(rank: int) -> str:
    with mock.patch.object(gradsieve.version, "VERSION", f"1.{rank}"):
        try:
            learning(rank)
        except gradsieve.MismatchError as error:
            return str(error)
    return ""


def test_ranks_of_different_releases_are_refused_with_both_versions(two: Ranks) -> None:
    for said in two.run(of_another_release):
        assert "ranks differ in the version of gradsieve: rank 0 has 1.0; rank 1 has 1.1" in said
