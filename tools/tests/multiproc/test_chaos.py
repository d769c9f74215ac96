"""A few faults of the cheapest kinds on real ranks; the whole of it is a command, `gradsieve lab chaos`."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import torch

from gradsieve import ranks_alike
from gradsieve.checkpoint import files
from gradsieve.checkpoint.fencing import FencingToken
from gradsieve.pipeline.frame import Checksum
from gradsieve_tools.chaos.campaign import Campaign
from gradsieve_tools.chaos.rank import Episode, be_rank
from gradsieve_tools.chaos.schedule import Chance
from gradsieve_tools.chaos.verdicts import HARMLESS, NAMED, Line

BEFORE_OPEN = 6
"""Of a manifest: which operation it is follows from the bit."""


def chance(kind: str, rank: int, step: int, op: int = 0) -> Chance:
    bit = BEFORE_OPEN if kind == "late waker" else 5
    return Chance(0, "stripes", kind, rank, step, op, delay=0.0, bit=bit)


def test_a_training_goes_on_through_faults() -> None:
    faults = [chance("SIGKILL", 0, 3, 1), chance("flipped", 1, 1), chance("memory cap", 2, 0)]
    with Campaign(1, faults) as campaign:
        lines = list(campaign.run())
    outcomes = [line.outcome for line in lines]
    assert outcomes == [NAMED] * 3, lines
    assert campaign.recovered.total() == 3, "all ranks were back with the undisturbed bits"
    assert lines[0].kept_at == 2
    assert lines[0].lost_steps == 1
    assert lines[0].lost_mass > 0.0
    assert campaign.remains() == []


def be_rank_unchecked(rank: int, episode: Episode, pipe: Any) -> None:
    with mock.patch.object(Checksum, "check"):
        be_rank(rank, episode, pipe)


def test_what_is_applied_silently_and_what_does_not_happen_are_seen() -> None:
    with Campaign(1, [chance("flipped", 1, 1), chance("SIGKILL", 0, 99)], be_rank_unchecked) as campaign:
        flipped, absent = list[Line](campaign.run())
    assert "silent loss: rank 0 took step 2 and the shared model is another" in flipped.outcome
    assert not flipped.is_good
    assert "the fault did not happen" in absent.outcome
    assert campaign.recovered.total() == 0


def test_saves_are_whole_or_none_and_refusals_are_survived() -> None:
    kinds = [("late waker", NAMED), ("SIGKILL in a manifest", NAMED), ("damaged sum", NAMED)]
    kinds += [("refused load", HARMLESS), ("refused save", HARMLESS), ("notice", HARMLESS)]
    kinds += [("store gone", HARMLESS), ("mixed releases", NAMED)]
    faults = [chance(kind, 0, -1 if kind == "refused load" else 1) for kind, _ in kinds]
    with Campaign(1, faults) as campaign:
        lines = list(campaign.run())
    assert [line.outcome for line in lines] == [outcome for _, outcome in kinds], lines
    assert all(line.kept_at >= line.acknowledged_at for line in lines)
    assert campaign.recovered.total() == 4
    assert campaign.remains() == []


def put_over(folder: Path, token: FencingToken, text: str, keeps_last: bool) -> None:
    """As it was before there were terms."""
    files.write(folder, f"manifest-{token}.part", [memoryview(text.encode())], lambda _: token.manifest)
    for each in folder.iterdir():
        if f"-{token}" not in each.name:
            each.unlink()


def be_rank_careless(rank: int, episode: Episode, pipe: Any) -> None:
    """Neither who saves nor what is saved is compared."""
    alike = {"everything": torch.zeros(1)}
    with (
        mock.patch.object(files, "write_manifest", put_over),
        mock.patch.object(ranks_alike, "replicated", return_value=alike),
    ):
        be_rank(rank, episode, pipe)


def test_a_checkpoint_that_was_put_over_and_one_of_ranks_that_differ_are_seen() -> None:
    with Campaign(1, [chance("late waker", 0, 1), chance("damaged sum", 1, 1)], be_rank_careless) as campaign:
        waker, spoilt = list[Line](campaign.run())
    assert "the checkpoint of step 4 was acknowledged and cannot be read" in waker.outcome
    assert "silent loss" in spoilt.outcome
    assert not waker.is_good
    assert not spoilt.is_good
