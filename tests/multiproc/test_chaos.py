"""A few faults of the cheapest kinds on real ranks; the whole of it is a command, `gradsieve lab chaos`."""

from __future__ import annotations

from typing import Any
from unittest import mock

from gradsieve.lab.chaos.campaign import Campaign
from gradsieve.lab.chaos.judge import NAMED, Line
from gradsieve.lab.chaos.rank import Episode, be_rank
from gradsieve.lab.chaos.schedule import Chance
from gradsieve.sync.ledger import Ledger


def chance(kind: str, rank: int, step: int, op: int = 0) -> Chance:
    return Chance(0, "stripes", kind, rank, step, op, delay=0.0, bit=5)


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
    with mock.patch.object(Ledger, "check"):
        be_rank(rank, episode, pipe)


def test_what_is_applied_silently_and_what_does_not_happen_are_seen() -> None:
    with Campaign(1, [chance("flipped", 1, 1), chance("SIGKILL", 0, 99)], be_rank_unchecked) as campaign:
        flipped, absent = list[Line](campaign.run())
    assert "silent loss: rank 0 took step 2 and the shared model is another" in flipped.outcome
    assert not flipped.is_good
    assert "the fault did not happen" in absent.outcome
    assert campaign.recovered.total() == 0
