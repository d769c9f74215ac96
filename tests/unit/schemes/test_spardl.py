"""SparDL: rounds, message sizes, what each kind of residual collection keeps, teams."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gradsieve.comm import lockstep, rounds
from gradsieve.comm.links import Links
from gradsieve.comm.ops import Meter
from gradsieve.errors import ConfigError
from gradsieve.schemes.base import log2_ceil
from gradsieve.schemes.block_buffers import BlockBuffers, Entries
from gradsieve.schemes.spardl import SparDL
from gradsieve.testing.gradients import Source
from gradsieve.testing.ranks import VirtualRanks
from gradsieve.types import Ctx, Outcome

N = 2000


def one_step(scheme: SparDL, accs: list[torch.Tensor]) -> tuple[list[Outcome[Any]], list[Meter]]:
    world = len(accs)
    meters = [Meter(rank, world) for rank in range(world)]
    programs = [
        scheme.exchange(acc, scheme.begin(acc.numel(), world), Ctx(rank, world, 0))
        for rank, acc in enumerate(accs)
    ]
    return lockstep.run(programs, meters), meters


def gradients(world: int, n: int = N) -> list[torch.Tensor]:
    return [Source("normal", (n,))(0, rank, 0) for rank in range(world)]


@pytest.mark.parametrize("world", [1, 2, 3, 5, 6, 7, 8, 13, 16, 33])
def test_rounds_are_twice_the_ceiling_of_the_logarithm_and_words_four_k(world: int) -> None:
    scheme = SparDL(density=0.1)
    _, meters = one_step(scheme, gradients(world))
    assert {meter.rounds for meter in meters} == {2 * log2_ceil(world)} == {scheme.expected_rounds(N, world)}
    k = scheme.k(N)
    for meter in meters:
        assert meter.moved / 4 == pytest.approx(4 * k * (world - 1) / world, abs=4 * world)


@pytest.mark.parametrize(("world", "teams"), [(4, 2), (8, 2), (8, 4), (8, 8), (12, 4), (16, 16)])
def test_r_sag_takes_the_rounds_and_words_of_its_formula(world: int, teams: int) -> None:
    scheme = SparDL(density=0.1, teams=teams, across="r-sag")
    _, meters = one_step(scheme, gradients(world))
    assert {meter.rounds for meter in meters} == {2 * log2_ceil(world // teams) + log2_ceil(teams)}
    words = max(meter.moved for meter in meters) / 4
    assert words == pytest.approx(scheme.expected_words(N, world), rel=0.03)


@pytest.mark.parametrize(("world", "teams"), [(4, 2), (6, 3), (12, 3), (12, 4), (10, 5)])
def test_b_sag_stays_in_its_band_and_learns_how_many_elements_fit(world: int, teams: int) -> None:
    scheme = SparDL(density=0.1, teams=teams)
    fleet = VirtualRanks(scheme, [N], world)
    k = scheme.k(N)
    least, most = 2 * k * (2 * world - teams - 1) / world, 2 * k * (teams**2 + 2 * world - 3 * teams) / world
    for round_ in fleet.advance(Source("normal", (N,)), 30):
        meters = [Meter(rank, world) for rank in range(world)]
        programs = [
            scheme.exchange(acc, state, Ctx(rank, world, round_.step))
            for rank, (acc, state) in enumerate(zip(round_.accs, round_.states, strict=True))
        ]
        lockstep.run(programs, meters)
        assert 0.97 * least <= max(meter.moved for meter in meters) / 4 <= 1.03 * most
        assert {meter.rounds for meter in meters} == {2 * log2_ceil(world // teams) + log2_ceil(teams)}
    kept = [states[0].kept for states in fleet.states]
    part = k // (world // teams)
    assert max(kept) > part // teams, "h never moved"
    assert max(kept) <= part
    places = world // teams
    assert all(kept[rank] == kept[rank % places] for rank in range(world)), "teams disagree"


def test_at_most_k_elements_come_back_and_each_block_gives_its_part() -> None:
    outcomes, _ = one_step(SparDL(density=0.1), gradients(8))
    picked = outcomes[0].update.indices
    assert picked.numel() == 200
    assert torch.bincount(picked // 250, minlength=8).tolist() == [25] * 8


def test_two_ranks_by_hand() -> None:
    """Blocks 0..2 and 3..5, one element each. Rank 0 sends its largest of block 1, rank 1 of block 0."""
    accs = [torch.tensor([5.0, 0, 0, 1, 9, 0]), torch.tensor([1.0, 7, 0, 8, 2, 0])]
    outcomes, _ = one_step(SparDL(density=0.34), accs)
    assert outcomes[0].update.indices.tolist() == [1, 4]  # 7 + 0 beats 5; 9 + 2 beats 8
    assert outcomes[0].update.values.tolist() == [7.0, 11.0]
    assert outcomes[0].spent.values.tolist() == [0.0, 9.0]
    assert outcomes[1].spent.values.tolist() == [7.0, 2.0]


def lost(scheme: SparDL, world: int, steps: int = 8) -> float:
    """Gradient that is in no update and in no residual, over what was sent."""
    fleet = VirtualRanks(scheme, [N], world, torch.float64)
    source = Source("integers", (N,), dtype=torch.float64)
    balance, moved = torch.zeros(N, dtype=torch.float64), 0.0
    for round_ in fleet.advance(source, steps):
        update = round_.outcomes[0].update.to_dense()
        balance += sum(source(round_.step, rank, 0) for rank in range(world)) - update
        moved += float(update.abs().sum())
    balance -= torch.stack([residuals[0] for residuals in fleet.residuals]).sum(0)
    return float(balance.abs().sum()) / moved


@pytest.mark.parametrize(("world", "teams"), [(6, 1), (8, 1), (8, 4)])
def test_nothing_is_lost_with_all_residuals_and_the_more_the_fewer_are_collected(
    world: int, teams: int
) -> None:
    loss = {
        kind: lost(SparDL(density=0.05, teams=teams, residuals=kind), world)
        for kind in ("local", "end", "all")
    }
    assert loss["all"] == 0.0
    assert loss["local"] > loss["end"] > 0.01


def test_r_sag_with_half_shares_everywhere_as_in_the_release_would_make_gradient_up() -> None:
    """Dropped in round s by 2^(s+1) teams alike: half each is right in the first round only."""
    world = 8
    right = SparDL(density=0.05, teams=8, across="r-sag")
    assert lost(right, world) == 0.0
    original = BlockBuffers.drop

    def halves(bags: BlockBuffers, entries: Entries) -> None:
        original(bags, Entries(entries.indices, entries.values * 2))

    BlockBuffers.drop = halves  # type: ignore[method-assign]
    try:
        assert lost(right, world) > 0.01
    finally:
        BlockBuffers.drop = original  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("settings", "world", "message"),
    [
        ({"teams": 3}, 8, "8 ranks cannot form 3 teams"),
        ({"teams": 0}, 8, "cannot form 0 teams"),
        ({"teams": 3, "across": "r-sag"}, 6, "power of two"),
        ({"teams": "many"}, 6, "teams"),
        ({"across": "z-sag"}, 6, "across"),
        ({"residuals": "none"}, 6, "residuals"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], world: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SparDL(**settings).begin(10, world)


def test_slow_links_choose_few_rounds_and_narrow_ones_few_words() -> None:
    scheme = SparDL(density=0.001, teams="auto", across="r-sag")
    n, world = 1_000_000, 16
    assert scheme.best_teams(n, world, Links(latency=0.0, word=1e-6)) == 1
    far = scheme.best_teams(n, world, Links(latency=1.0, word=1e-9))
    assert far == 16
    rounds = [
        scheme.expected_rounds(n, world, scheme.begin(n, world).__class__(n=n, teams=d)) for d in (1, 16)
    ]
    assert rounds == [8, 4]


def test_only_divisors_and_where_needed_powers_of_two_are_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def tries(scheme: SparDL, n: int, world: int, state: Any) -> int:
        tried.append(state.teams)
        return 0

    monkeypatch.setattr(SparDL, "expected_rounds", tries)
    SparDL(teams="auto").best_teams(1000, 12, Links(latency=0.0, word=0.0))
    assert tried == [1, 2, 3, 4, 6, 12]
    tried.clear()
    SparDL(teams="auto", across="r-sag").best_teams(1000, 12, Links(latency=0.0, word=0.0))
    assert tried == [1, 2, 4]


def test_auto_is_decided_once_and_alike_on_all_ranks() -> None:
    fleet = VirtualRanks(SparDL(density=0.05, teams="auto"), [N], 6)
    for _ in fleet.advance(Source("normal", (N,)), 1):
        pass
    chosen = {states[0].teams for states in fleet.states}
    assert len(chosen) == 1
    assert 6 % chosen.copy().pop() == 0
    for round_ in fleet.advance(Source("normal", (N,)), 2):
        assert {outcome.state.teams for outcome in round_.outcomes} == chosen


@pytest.mark.parametrize("members", [1, 2, 3, 5, 8, 13])
def test_bruck_gathers_messages_of_any_length_in_logarithmic_rounds(members: int) -> None:
    lengths = [(3 * place) % 5 for place in range(members)]
    messages = [torch.full((length,), place) for place, length in enumerate(lengths)]
    meters = [Meter(rank, members) for rank in range(members)]
    replies = lockstep.run(
        [rounds.gather(messages[place], place, range(members), lengths) for place in range(members)], meters
    )
    assert {meter.rounds for meter in meters} == {log2_ceil(members)}
    for reply in replies:
        assert torch.equal(reply, torch.cat(messages))


@pytest.mark.parametrize("members", [1, 2, 3, 5, 6, 8, 13])
def test_transpose_hands_one_number_to_everybody_in_logarithmic_rounds(members: int) -> None:
    table = torch.arange(members * members).view(members, members)
    meters = [Meter(rank, members) for rank in range(members)]
    columns = lockstep.run([rounds.transpose(table[rank], rank) for rank in range(members)], meters)
    assert torch.equal(torch.stack(columns), table.T)
    assert {meter.rounds for meter in meters} == {log2_ceil(members)}
