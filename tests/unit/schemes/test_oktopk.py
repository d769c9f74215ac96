"""Ok-Topk: at most 6k words whatever the skew, the k largest sums on exact steps, regions in balance."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gradsieve.comm import lockstep
from gradsieve.comm.ops import AllReduce, Meter
from gradsieve.errors import Malformed
from gradsieve.schemes import oktopk, oktopk_parts
from gradsieve.schemes.oktopk import OkTopk
from gradsieve.schemes.oktopk_parts import balancing_pays, gather_lists
from gradsieve.testing import VirtualRanks
from gradsieve.testing.gradients import Source
from gradsieve.types import Ctx, Outcome
from gradsieve.wire.check import lists_increasing
from gradsieve_tools.bench.traffic import Case, Fleet, Gradients, Step

N, DENSITY, K = 20_000, 0.05, 1_000


class Even(Gradients):
    """Normal, the same everywhere."""

    STEEP, HOT, MEAN = 0.0, 0.0, 0.0


KINDS = {"even": Even, "skewed": Gradients}


def steps_of(world: int, kind: str, steps: int) -> list[tuple[Step, Any]]:
    """Every step with the state after it."""
    fleet = Fleet(Case("oktopk", world, N, DENSITY))
    fleet.gradients = KINDS[kind](N, scale=1.0)
    return [(fleet.step(), fleet.states[0]) for _ in range(steps)]


def one_step(scheme: OkTopk, accs: list[Tensor], states: list[Any] | None = None, step: int = 0) -> Any:
    n, world = accs[0].numel(), len(accs)
    states = states or [scheme.begin(n, world) for _ in accs]
    ranks = zip(accs, states, strict=True)
    return lockstep.run(
        [scheme.exchange(acc, state, Ctx(rank, world, step)) for rank, (acc, state) in enumerate(ranks)]
    )


def test_a_step_worked_by_hand() -> None:
    """k = 2. Selected are 0, 1 and 1, 7; the one cut is the mean of 1 and 7; the sums are 4, 6 and -8.

    Three elements came to the first owner and one to the second: 2 of 4 would be at two thirds of 0..4.
    """
    accs = [torch.tensor([4.0, -3, 2, 1, 0, 0, 0, 0]), torch.tensor([0.0, 9, 0, 0, 0, 0, 0, -8])]
    first, second = one_step(OkTopk(density=0.25), accs)
    assert first.state.cuts.tolist() == [0, 3, 8]
    assert first.update.indices.tolist() == [1, 7]
    assert first.update.values.tolist() == [6.0, -8.0]
    assert (first.spent.indices.tolist(), first.spent.values.tolist()) == ([1], [-3.0])
    assert (second.spent.indices.tolist(), second.spent.values.tolist()) == ([1, 7], [9.0, -8.0])
    assert first.state.gathered == 3
    assert first.state.imbalance == 1.5
    assert 2.5 < first.state.local_threshold <= 3
    assert 5 < first.state.global_threshold <= 6


# -- volume -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("world", "steps"), [(2, 40), (3, 40), (4, 40), (7, 40), (8, 40), (16, 20), (64, 6)])
def test_a_step_that_evaluates_nothing_moves_less_than_six_k(world: int, steps: int, kind: str) -> None:
    """From the second step on, sizes and new regions included; there is no warm-up."""
    for number, (step, state) in enumerate(steps_of(world, kind, steps)):
        if number % 32:
            assert state.gathered <= K, "an exact step out of turn"
            assert step.words < 6 * K * (world - 1) / world
        assert step.near_formula, f"{step.words} words in step {number}"


@pytest.mark.parametrize("kind", KINDS)
def test_density_stays_near_its_target(kind: str) -> None:
    for step, _ in steps_of(4, kind, 100):
        assert step.density == pytest.approx(DENSITY, rel=0.2)


@pytest.mark.parametrize("world", [2, 3, 8])
def test_rounds_are_those_of_an_all_to_all_and_another_to_balance(world: int) -> None:
    log = (world - 1).bit_length()
    least = (world - 1) + 3 * log
    for step, _ in steps_of(world, "even", 8)[1:]:
        assert step.rounds in (least, least + world - 1)
        assert step.formula_rounds == 2 * world + 2 * log
        assert step.rounds <= 1.1 * step.formula_rounds


def gathered(counts: list[int]) -> tuple[list[Tensor], list[Meter], Tensor]:
    """What every rank has after the gather, what it moved, and what it should have."""
    rows = torch.arange(2 * sum(counts), dtype=torch.int32).view(-1, 2)
    meters = [Meter(rank, len(counts)) for rank in range(len(counts))]
    pays = balancing_pays(torch.tensor(counts))
    programs = [
        gather_lists(part.clone(), torch.tensor(counts), rank, pays)
        for rank, part in enumerate(rows.split(counts))
    ]
    return lockstep.run(programs, meters), meters, rows


@given(st.lists(st.integers(0, 30), min_size=1, max_size=9))
def test_lists_are_gathered_in_order_by_the_cheaper_way(counts: list[int]) -> None:
    found, meters, rows = gathered(counts)
    assert all(torch.equal(each, rows) for each in found)
    others = len(counts) - 1
    padded = 8 * max(counts) * others
    busiest = max(meter.moved for meter in meters)
    assert busiest <= padded
    assert busiest <= 8 * others * -(-sum(counts) // len(counts)) + 8 * max(counts) or busiest == padded
    assert (busiest < padded) == balancing_pays(torch.tensor(counts))


# -- exact steps --------------------------------------------------------------------------------------


def integers(n: int, world: int, seed: int = 0) -> list[Tensor]:
    source = torch.Generator().manual_seed(seed)
    return [torch.randint(-(2**20), 2**20, (n,), generator=source).float() for _ in range(world)]


@pytest.mark.parametrize("world", [1, 2, 5, 16])
def test_an_exact_step_takes_the_k_largest_sums_of_what_was_sent(
    world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oktopk, "thinned", lambda acc, selected, cuts, k: selected)
    accs, k = integers(1000, world), 50
    sent = torch.zeros(world, 1000)
    for row, acc in zip(sent, accs, strict=True):
        best = acc.abs().topk(k).indices
        row[best] = acc[best]
    total = sent.sum(0)
    update = one_step(OkTopk(density=0.05), accs)[0].update
    assert update.indices.tolist() == total.abs().topk(k).indices.sort().values.tolist()
    assert torch.equal(update.values, total[update.indices])


def test_what_was_sent_on_an_exact_step_does_not_stay_in_the_residual() -> None:
    """The release clears nothing on these steps where it needs a sorted list and has one by magnitude."""
    accs = integers(1000, 4)
    outcomes = one_step(OkTopk(density=0.05), accs)
    total, update = torch.stack(accs).sum(0), outcomes[0].update
    for outcome, acc in zip(outcomes, accs, strict=True):
        own = acc.abs().topk(50).indices
        both = own[torch.isin(own, update.indices)].sort().values
        assert outcome.spent.indices.tolist() == both.tolist()
        outcome.spent.subtract_from(acc)
        assert both.numel() > 0
        assert not acc[both].any()
    assert torch.equal(torch.stack(accs).sum(0) + update.to_dense(), total)


def test_ranks_that_cancel_each_other_out_are_told() -> None:
    """A sum of zero is sent when there is nothing better, or both would offer the same for ever."""
    scheme = OkTopk(density=0.1)
    outcomes = one_step(scheme, [torch.eye(10)[3] * 5, torch.eye(10)[3] * -5])
    assert outcomes[0].update.indices.tolist() == [3]
    assert [outcome.spent.values.tolist() for outcome in outcomes] == [[5.0], [-5.0]]


def test_a_threshold_that_is_lost_is_found_in_the_same_step() -> None:
    """Gradients a hundred times smaller from one step to the next, residuals gone."""
    scheme, accs = OkTopk(density=0.05), integers(2000, 3)
    states = [outcome.state for outcome in one_step(scheme, accs)]
    smaller = [acc / 100 for acc in integers(2000, 3, seed=1)]
    outcomes: list[Outcome[Any]] = one_step(scheme, smaller, states, step=1)
    assert outcomes[0].update.count == 100
    assert outcomes[0].state.gathered > 100
    assert 0 < outcomes[0].state.global_threshold < states[0].global_threshold / 10


def test_at_most_k_are_sent_and_only_an_exact_step_gathers_more() -> None:
    source = Source("normal", (2000,))
    for round_ in VirtualRanks(OkTopk(density=0.05), [2000], 5).advance(source, 34):
        assert all(outcome.spent.count <= 100 for outcome in round_.outcomes)
        assert round_.outcomes[0].update.count <= 100
        assert (round_.outcomes[0].state.gathered > 100) == (round_.step in (0, 32))


# -- regions ------------------------------------------------------------------------------------------


def regions(lists: list[list[int]], n: int) -> list[int]:
    """The cuts that ranks with these selected indices agree on."""
    world = len(lists)
    wanted = [oktopk._quantiles(torch.tensor(each, dtype=torch.long), n, world) for each in lists]
    programs = [oktopk_parts.make_regions(each, n) for each in wanted]
    found = lockstep.run(programs)
    assert all(torch.equal(each, found[0]) for each in found)
    return found[0].tolist()


@pytest.mark.parametrize("world", [1, 2, 4, 7])
@pytest.mark.parametrize("count", [0, 1, 2, 5, 6, 100])
@pytest.mark.parametrize("n", [1000, 2**40])
def test_regions_hold_equal_shares_of_any_number_of_elements(world: int, count: int, n: int) -> None:
    """Also of fewer than P, and where the sum of P cuts needs more than 32 bits."""
    chosen = [n - 1 - 3 * place for place in range(count)][::-1]
    cuts = regions([chosen] * world, n)
    assert (cuts[0], cuts[-1], len(cuts)) == (0, n, world + 1)
    assert cuts == sorted(cuts)
    if not count:
        assert cuts == [part * n // world for part in range(world + 1)]
    shares = [sum(start <= index < stop for index in chosen) for start, stop in pairwise(cuts)]
    assert sum(shares) == count
    assert max(shares) - min(shares) <= 1


@pytest.mark.parametrize("lie", [-(2**62), 2**62, -1])
def test_a_lie_about_cuts_leaves_regions_in_order(lie: int) -> None:
    program = oktopk_parts.make_regions(torch.tensor([25, 50, 75]), 100)
    op = program.send(None)
    assert isinstance(op, AllReduce)
    with pytest.raises(StopIteration) as end:
        program.send(torch.tensor([60, lie, 100]) * 4)
    cuts = end.value.value.tolist()
    assert cuts == sorted(cuts)
    assert (cuts[0], cuts[-1]) == (0, 100)


def test_lists_of_peers_are_checked_one_by_one() -> None:
    lists_increasing(torch.tensor([10, 12, 10, 11, 19]), torch.tensor([2, 0, 3]), 10, 20, "indices")
    lists_increasing(torch.tensor([], dtype=torch.long), torch.tensor([0, 0]), 10, 20, "indices")
    for bad, culprit in [([12, 10, 10, 11, 19], 0), ([10, 12, 10, 10, 19], 2), ([10, 12, 9, 11, 19], 2)]:
        with pytest.raises(Malformed, match=rf"indices of rank {culprit} are not sorted"):
            lists_increasing(torch.tensor(bad), torch.tensor([2, 0, 3]), 10, 20, "indices")
    with pytest.raises(Malformed, match=r"rank 1 are not sorted, unique and inside 10..19"):
        lists_increasing(torch.tensor([10, 20]), torch.tensor([1, 1]), 10, 20, "indices")
