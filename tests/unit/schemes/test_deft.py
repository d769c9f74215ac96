"""DEFT: layers, the division of k, packing; by hand and over many random cases."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradsieve.comm import lockstep
from gradsieve.errors import ConfigError
from gradsieve.schemes import deft
from gradsieve.schemes.deft import Deft
from gradsieve.testing.gradients import Source
from gradsieve.testing.ranks import VirtualRanks
from gradsieve.types import Ctx

norms = st.lists(st.sampled_from([0.0, 1e-30, 0.1, 1.0, 3.0, 1e6]), min_size=1, max_size=12)


def test_every_element_is_in_one_layer_for_any_sizes_and_world() -> None:
    for sizes in ([0], [1], [5, 0, 7], [1, 1, 1, 100], []):
        for world in (1, 2, 3, 8, 200):
            edges = Deft().init_state(sizes, world).edges
            assert edges[0] == 0
            assert edges[-1] == sum(sizes)
            assert bool((edges.diff() > 0).all())


@given(norms=norms, sizes=st.data(), k=st.integers(1, 300), step=st.integers(0, 1000))
def test_counts_add_up_to_k_and_no_layer_gives_more_than_it_has(
    norms: list[float], sizes: st.DataObject, k: int, step: int
) -> None:
    length = st.lists(st.integers(1, 60), min_size=len(norms), max_size=len(norms))
    size = torch.tensor(sizes.draw(length))
    norm = torch.tensor(norms, dtype=torch.float64)
    counts = deft._apportion(norm, size, k, step)
    assert bool((counts >= 0).all())
    assert bool((counts <= size).all())
    assert not counts[norm == 0].any()
    assert int(counts.sum()) == min(k, int(size[norm > 0].sum()))


def test_the_largest_cost_goes_first_to_whoever_is_done_with_it_first() -> None:
    cost, even = torch.tensor([7.0, 5.0, 4.0, 3.0, 2.0]), torch.ones(2).double() / 2
    assert deft.pack(cost, even, 0, even=True).tolist() == [0, 1, 1, 0, 1]
    assert deft.pack(cost, even, 1, even=True).tolist() == [1, 0, 0, 1, 0], "owners do not rotate"


def test_a_rank_three_times_as_fast_gets_three_times_the_work() -> None:
    cost, work = torch.rand(400, dtype=torch.float64), torch.tensor([3.0, 1.0]).double() / 4
    owner = deft.pack(cost, work, 5, even=False)
    assert float(cost[owner == 0].sum() / cost.sum()) == pytest.approx(0.75, abs=0.01)
    blind = deft.pack(cost, torch.ones(2).double() / 2, 5, even=True)
    assert float(cost[blind == 0].sum() / cost.sum()) == pytest.approx(0.5, abs=0.01)


def test_with_unequal_speeds_every_rank_still_gets_every_layer_some_day() -> None:
    cost, work = torch.tensor([9.0, 5.0, 1.0]), torch.tensor([8.0, 1.0]).double() / 9
    seen = {
        (layer, rank)
        for step in range(6)
        for layer, rank in enumerate(deft.pack(cost, work, step, even=False).tolist())
    }
    assert seen == {(layer, rank) for layer in range(3) for rank in range(2)}
    usual = [deft.pack(cost, work, step, even=True).tolist() for step in range(6)]
    assert {owners[0] for owners in usual} == {0}, "the twin: without that, layer 0 is always with rank 0"


@pytest.mark.parametrize("speeds", [None, (1.0, 2.0, 3.0)])
def test_exactly_k_elements_travel_while_there_are_as_many(speeds: tuple[float, ...] | None) -> None:
    """The release sends sum over ranks of each rank's own idea of its layers' counts."""
    scheme = Deft(density=0.037, speeds=speeds)
    fleet = VirtualRanks(scheme, [1000], 3)
    for round_ in fleet.advance(Source("normal", (1000,)), 20):
        assert round_.outcomes[0].update.count == 37


def test_a_layer_that_travels_whole_sends_no_index() -> None:
    scheme = Deft(density=0.5)
    accs = [torch.tensor([100.0, 100.0, 1.0, 1.0, 1.0, 1.0]) for _ in range(2)]
    state = scheme.init_state([2, 4], world=2)
    assert state.edges.tolist() == [0, 2, 4, 6]
    outcomes = lockstep.run([scheme.exchange(acc, state, Ctx(r, 2, 0)) for r, acc in enumerate(accs)])
    assert {0, 1} <= set(outcomes[0].update.indices.tolist())
    assert outcomes[0].state.rows == outcomes[0].update.count - 2


def test_speeds_for_another_number_of_ranks_are_refused() -> None:
    scheme = Deft(speeds=(1.0, 2.0))
    program = scheme.exchange(torch.ones(9), scheme.begin(9, 3), Ctx(0, 3, 0))
    norms = next(program).tensor
    with pytest.raises(ConfigError, match="2 numbers for 3 ranks"):
        program.send(norms)
