"""Blocks of codes: they end with their tensors, every form writes them alike, and zeros stay zeros."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gradsieve import kernels
from gradsieve.comm import lockstep
from gradsieve.kernels.blocks import BLOCK, Blocks, block_layout, even
from gradsieve.schemes.base import Values
from gradsieve.schemes.stripes import Stripes, cost
from gradsieve.testing.laws import same_bits
from gradsieve.types import Ctx, Outcome
from unit.kernels.test_low_bit_forms import check_decoding, check_forms

Outcomes: TypeAlias = list[Outcome[Any]]

some_sizes = st.lists(
    st.integers(0, 40) | st.sampled_from([255, 256, 257, 511, 512, 700, 1300]), min_size=1, max_size=9
)
every_width = pytest.mark.parametrize("bits", [1, 2, 4])


def by_hand(sizes: list[int]) -> list[int]:
    edges, start = [], 0
    for size in sizes:
        edges += range(start, start + size, BLOCK)
        start += size
    return [*edges, start]


@given(sizes=some_sizes)
def test_blocks_are_counted_from_the_start_of_each_tensor(sizes: list[int]) -> None:
    layout = block_layout(tuple(sizes))
    assert layout.edges.tolist() == by_hand(sizes)
    for bits in (1, 2, 4):
        each = [-(-(stop - start) * bits // 8) for start, stop in pairwise(by_hand(sizes))]
        assert np.diff(layout.code_bytes(bits)).tolist() == each
    finer, places = layout.halved
    assert int(np.diff(finer.edges).max(initial=0)) <= BLOCK // 2
    assert finer.edges[places].tolist() == by_hand(sizes)


@given(sizes=some_sizes, parts=st.integers(1, 9), bits=st.sampled_from((1, 2, 4, 8)), data=st.data())
def test_parts_and_pieces_are_whole_blocks_end_to_end(
    sizes: list[int], parts: int, bits: int, data: st.DataObject
) -> None:
    layout = block_layout(tuple(sizes))
    ends = st.integers(0, len(layout.edges) - 1)
    first, last = sorted((data.draw(ends), data.draw(ends)))
    blocks = Blocks(layout, first, last)
    dealt = blocks.dealt(parts, bits)
    for cut in (dealt, blocks.split(2 * BLOCK)):
        assert [each.first for each in cut[1:]] == [each.last for each in cut[:-1]]
        assert not cut or (cut[0].first, cut[-1].last) == (first, last)
        assert sum(each.count for each in cut) == blocks.count
    assert len(dealt) == parts
    largest = 2 + BLOCK * bits // 8
    assert all(abs(each.size(bits) - blocks.size(bits) / parts) <= largest for each in dealt)
    assert all(0 < each.count <= 2 * BLOCK for each in blocks.split(2 * BLOCK))


def patterned(count: int, seed: int) -> Tensor:
    """Three rows: some zeros, mostly zeros, and few of them."""
    source = torch.Generator().manual_seed(seed)
    values = torch.randn(3, count, generator=source)
    shares = torch.tensor([[0.5], [0.95], [0.02]])
    return torch.where(torch.rand(values.shape, generator=source) < shares, 0.0, values)


def check_alike(bits: int, values: Tensor, blocks: Blocks | None) -> None:
    data, count = check_forms(bits, values, blocks), values.shape[-1]
    back = kernels.decode_low(bits, data, count, torch.float32, blocks)
    assert not bool(back[values == 0].any())
    noise = torch.randint(0, 256, data.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    check_decoding(bits, noise, count, blocks)


@every_width
def test_blocks_of_every_length_are_written_alike_whatever_is_zero(bits: int) -> None:
    for length in range(1, BLOCK + 1):
        check_alike(bits, patterned(length, length), None)
    lengths = tuple(range(1, BLOCK + 1))
    check_alike(bits, patterned(sum(lengths), 0), block_layout(lengths).between(0, sum(lengths)))


@every_width
@given(sizes=some_sizes, seed=st.integers(0, 99), spoiled=st.sampled_from([None, torch.nan, torch.inf, 3e38]))
def test_compiled_bytes_of_any_tensors_are_torchs(
    bits: int, sizes: list[int], seed: int, spoiled: float | None
) -> None:
    count = sum(sizes)
    values, blocks = patterned(count, seed), block_layout(tuple(sizes)).between(0, count)
    if spoiled is None:
        check_alike(bits, values, blocks)
    elif count:
        values[:, seed % count] = spoiled
        check_forms(bits, values, blocks)


@every_width
@pytest.mark.parametrize("form", ["torch", "compiled"])
def test_each_tensor_is_written_as_it_is_alone(bits: int, form: str) -> None:
    sizes = (300, 5, 256, 17)
    values = patterned(sum(sizes), 3)[0]
    with kernels.using(form):
        whole = kernels.encode_low(bits, values, block_layout(sizes).between(0, sum(sizes)))
        alone = [kernels.encode_low(bits, part) for part in values.split(list(sizes))]
        cuts = [2 * even(size).number for size in sizes]
    scales = torch.cat([each[:cut] for each, cut in zip(alone, cuts, strict=True)])
    codes = torch.cat([each[cut:] for each, cut in zip(alone, cuts, strict=True)])
    assert same_bits(whole, torch.cat([scales, codes]))


def exchanged(scheme: Stripes, sizes: list[int], waiting: list[Tensor], steps: int) -> Iterator[Outcomes]:
    """So many steps with feedback; whoever reads may add to what waits in between."""
    world = len(waiting)
    states = [scheme.init_state(sizes, world)] * world
    for step in range(steps):
        programs = [
            scheme.exchange(each, state, Ctx(rank, world, step))
            for rank, (each, state) in enumerate(zip(waiting, states, strict=True))
        ]
        outcomes = lockstep.run(programs)
        states = [outcome.state for outcome in outcomes]
        for each, outcome in zip(waiting, outcomes, strict=True):
            outcome.spent.subtract_from(each)
        yield outcomes


@pytest.mark.parametrize("values", ["sign", "int2", "int4"])
@given(sizes=some_sizes, world=st.sampled_from([1, 2, 3, 5]), seed=st.integers(0, 999), share=st.floats(0, 1))
def test_what_no_rank_moves_is_not_moved(
    values: Values, sizes: list[int], world: int, seed: int, share: float
) -> None:
    """Nor does any rank owe it anything afterwards, for many steps."""
    draw = torch.Generator().manual_seed(seed)
    n = sum(sizes)
    still = torch.rand(n, generator=draw) < share
    waiting = [torch.randn(n, generator=draw) * ~still for _ in range(world)]
    for outcomes in exchanged(Stripes(density=0.4, values=values), sizes, waiting, 8):
        assert not bool(outcomes[0].update.to_dense()[still].any())
        for each, outcome in zip(waiting, outcomes, strict=True):
            assert not bool(outcome.spent.to_dense()[still].any())
            assert not bool(each[still].any())
            each += torch.randn(n, generator=draw) * ~still


@pytest.mark.parametrize("values", ["sign", "int2", "int4", "int8"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_tensor_of_small_values_beside_a_large_one_keeps_its_own_scale(values: Values, world: int) -> None:
    sizes = [300, 129, 700]
    small, draw = slice(300, 429), torch.Generator().manual_seed(0)
    waiting = [1e3 * torch.randn(sum(sizes), generator=draw) for _ in range(world)]
    for each in waiting:
        each[small] *= 1e-9
    most = sum(float(each[small].abs().max()) for each in waiting)
    for outcomes in exchanged(Stripes(density=1.0, values=values), sizes, waiting, 6):
        assert float(outcomes[0].update.to_dense()[small].abs().max()) <= 3 * most
        assert all(float(each[small].abs().max()) <= 3 * most for each in waiting)


@pytest.mark.parametrize("values", ["sign", "int2"])
def test_halves_that_were_not_told_have_their_turn(values: Values) -> None:
    """With nothing new, what waits beside zeros is told step by step until next to nothing is left."""
    sizes, draw = [300, 40], torch.Generator().manual_seed(0)
    waiting = [torch.randn(340, generator=draw) for _ in range(2)]
    for each in waiting:
        each[::3] = 0.0
    before = sum(float(each.norm()) for each in waiting)
    for _ in exchanged(Stripes(density=1.0, values=values), sizes, waiting, 80):
        pass
    assert sum(float(each.norm()) for each in waiting) < 0.1 * before


def test_the_cursor_of_an_earlier_version_may_lie_within_a_block() -> None:
    scheme = Stripes(density=0.3)
    state = replace(scheme.init_state([700, 300], 2), cursor=650)
    programs = [scheme.exchange(torch.randn(1000), state, Ctx(rank, 2, 0)) for rank in range(2)]
    outcome = lockstep.run(programs)[0]
    assert (outcome.update.start, outcome.update.stop) == (512, 1000)
    assert outcome.state.sizes == (700, 300)


MANY_TENSORS = {
    "of 300": (300,) * 1000,
    "of 64 to 2000": tuple(int(64 * (2000 / 64) ** (i / 999)) for i in range(1000)),
    "of 10 million": (10_000_000,),
}


@pytest.mark.parametrize(
    ("sizes", "sign", "int2"),
    [("of 300", 1.12, 2.107), ("of 64 to 2000", 1.08, 2.08), ("of 10 million", 1.0626, 2.0626)],
)
def test_what_scales_and_short_blocks_cost(sizes: str, sign: float, int2: float) -> None:
    """Bits an element of a thousand tensors, one way; without tensors' ends it is 1.0625 and 2.0625."""
    for values, bits in (("sign", sign), ("int2", int2)):
        layout = block_layout(MANY_TENSORS[sizes])
        assert cost(values, 2, [layout]) == pytest.approx(bits, abs=0.006)  # type: ignore[arg-type]
