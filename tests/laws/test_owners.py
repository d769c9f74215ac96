"""Fewer owners than ranks: who owns what, and the laws of ExDyna with rows of few elements."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradsieve.errors import Malformed
from gradsieve.schemes.exclusive import read_rows
from gradsieve.schemes.exdyna import ExDyna
from gradsieve.schemes.shares import MANY, Owners, partitions
from gradsieve.testing.gradients import KINDS, Source
from gradsieve.testing.laws import check_drained, check_round, check_same_states
from gradsieve.testing.ranks import VirtualRanks
from gradsieve.wire import indices


@given(world=st.integers(1, 70), step=st.integers(0, 300), data=st.data())
def test_every_partition_has_one_owner(world: int, step: int, data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, world))
    owners = Owners(world, parts, step)
    by_rank = {rank: owners.part_of(rank) for rank in range(world) if owners.part_of(rank) is not None}
    assert sorted(by_rank.values()) == list(range(parts))
    assert list(by_rank) == owners.ranks().tolist(), "in rank order"
    assert list(by_rank.values()) == [(owners.first + row) % parts for row in range(parts)]


@pytest.mark.parametrize(("world", "parts"), [(5, 5), (20, 3), (33, 20), (17, 1)])
def test_every_rank_owns_every_partition_once_in_as_many_steps_as_ranks(world: int, parts: int) -> None:
    owned = Counter(
        (rank, Owners(world, parts, step).part_of(rank)) for step in range(world) for rank in range(world)
    )
    for rank in range(world):
        assert all(owned[rank, part] == 1 for part in range(parts))


def test_rows_hold_some_64_elements_or_all_ranks_own() -> None:
    assert partitions(10, MANY) == MANY
    assert partitions(10, MANY + 1) == 1
    assert partitions(25_000, 1024) == 390
    assert partitions(100_000, 1024) == 1024


@settings(max_examples=6)
@given(
    world=st.sampled_from([17, 20, 33]),
    n=st.integers(0, 1500),
    kind=st.sampled_from(list(KINDS)),
    density=st.sampled_from([0.01, 0.2, 0.7]),
)
def test_laws_hold(world: int, n: int, kind: str, density: float) -> None:
    fleet, source = VirtualRanks(ExDyna(density=density), [n], world), Source(kind, (n,))
    for round_ in fleet.advance(source, 3):
        check_round(round_, source.exact)
    check_same_states(fleet.states)


def test_what_waits_is_drained_at_last() -> None:
    world, source = 18, Source("integers", (60,))
    fleet = VirtualRanks(ExDyna(density=0.3), [60], world)
    assert fleet.states[0][0].cuts.numel() == 2, "one owner"
    for _ in fleet.advance(lambda step, rank, bucket: source(step, rank, bucket) * (step < 3), 60):
        pass
    check_drained([residual[0] for residual in fleet.residuals])


def test_a_lie_is_blamed_on_the_rank_that_sent_the_row() -> None:
    owners, cuts = Owners(20, 4, 7), np.array([0, 10, 20, 30, 40])
    codec = indices.choose(5, 10)
    row = codec.encode(torch.arange(5), torch.tensor(5), 5, 10).numpy()
    header = np.concatenate([np.array([5], np.int64).view(np.uint8), np.zeros(4, np.uint8)])
    rows = np.stack([np.concatenate([header, row])] * 4)
    assert read_rows(rows, codec, cuts, 5, owners).picked.tolist() == [
        10 * p + i for p in range(4) for i in range(5)
    ]
    rows[2, :8] = np.array([11], np.int64).view(np.uint8)
    with pytest.raises(Malformed, match=f"rank {owners.ranks()[2]} announced 11 elements in step 7"):
        read_rows(rows, codec, cuts, 5, owners)
