"""Indices in few bytes: they come back, cost what was predicted, wait for nothing and trust nobody."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from gradsieve.errors import Malformed
from gradsieve.wire.indices import INDEX_CODECS, IndexCodec, choose

RAW, ELIAS_FANO, BITMAP = INDEX_CODECS
BEYOND_INT32 = 2**31 + 5

Message = tuple[list[list[int]], int, int]
"""Rows of lawful indices, the capacity and the span."""


def codecs(*which: IndexCodec) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("codec", which, ids=lambda codec: codec.name)


def entropy_bound(density: float) -> float:
    """Bits per selected index below which no code for independent choices of this density can get."""
    rest = 1 - density
    return (density * math.log2(1 / density) + rest * math.log2(1 / rest)) / density


@pytest.mark.parametrize("density", [0.01, 0.001])
@pytest.mark.parametrize(("slack", "limit"), [(1.0, 1.08), (1.125, 1.25)])
def test_a_row_is_near_the_entropy_bound(density: float, slack: float, limit: float) -> None:
    """A full row within 8 %, and one with the room that ExDyna leaves within the 25 % that are asked for."""
    count, span = 5000, round(5000 / density)
    capacity = int(slack * count)
    codec = choose(capacity, span)
    assert codec is ELIAS_FANO
    assert entropy_bound(density) <= 8 * codec.predict_size(capacity, span) / count
    assert 8 * codec.predict_size(capacity, span) / count <= limit * entropy_bound(density)
    assert 8 * RAW.predict_size(capacity, span) / count > 2 * entropy_bound(density), (
        "the limit can be missed"
    )


@st.composite
def messages(draw: st.DrawFn) -> Message:
    span = draw(st.sampled_from([1, 2, 7, 8, 9, 64, 1000]) | st.integers(1, 300))
    capacity = draw(st.just(span) | st.integers(0, min(span, 40)))
    row = st.sets(st.integers(0, span - 1), max_size=capacity).map(sorted)
    full = st.just(list(range(span))[span - capacity :])
    return draw(st.lists(row | full, min_size=1, max_size=4)), capacity, span


def encoded(
    codec: IndexCodec, row: list[int], capacity: int, span: int, padding: int | None = None
) -> Tensor:
    padded = row + [span if padding is None else padding] * (capacity - len(row))
    indices = torch.tensor(padded, dtype=torch.int64)
    return codec.encode(indices, torch.tensor(len(row)), capacity, span)


def check_round_trip(codec: IndexCodec, rows: list[list[int]], capacity: int, span: int) -> None:
    data = [encoded(codec, row, capacity, span) for row in rows]
    assert all(each.dtype == torch.uint8 for each in data)
    assert {each.numel() for each in data} == {codec.predict_size(capacity, span)}
    counts = np.array([len(row) for row in rows])
    decoded = codec.decode(torch.stack(data).numpy(), counts, capacity, span)
    assert decoded.dtype == np.int64
    assert decoded.tolist() == [index for row in rows for index in row]


@codecs(*INDEX_CODECS)
@given(message=messages())
@example(message=([[], [0], []], 1, 1))
@example(message=([[]], 0, 5))
@example(message=([list(range(64)), [], [63]], 64, 64))
def test_indices_come_back(codec: IndexCodec, message: Message) -> None:
    check_round_trip(codec, *message)


@codecs(RAW, ELIAS_FANO)
@pytest.mark.parametrize("span", [2**31 - 1, 2**31, BEYOND_INT32, 2**40, 2**61])
def test_indices_of_huge_spans_come_back(codec: IndexCodec, span: int) -> None:
    check_round_trip(
        codec, [[0, span // 2, span - 1], [span - 1], [], [span - 3, span - 2, span - 1]], 5, span
    )


@codecs(*INDEX_CODECS)
@given(message=messages(), padding=st.integers(-(2**63), 2**63 - 1))
@example(message=([[3]], 4, 1000), padding=-1)
def test_what_stands_behind_the_count_does_not_matter(
    codec: IndexCodec, message: Message, padding: int
) -> None:
    (row, *_), capacity, span = message
    garbage = encoded(codec, row, capacity, span, padding)
    assert torch.equal(garbage, encoded(codec, row, capacity, span))


def check_lawful_or_refused(
    codec: IndexCodec, rows: np.ndarray, counts: np.ndarray, capacity: int, span: int
) -> None:
    try:
        indices = codec.decode(rows, counts, capacity, span)
    except Malformed:
        return
    assert len(indices) == counts.sum()
    for row in np.split(indices, counts.cumsum()[:-1]):
        assert row.tolist() == sorted(set(row.tolist()))
        assert all(0 <= index < span for index in row)


@codecs(*INDEX_CODECS)
@given(data=st.data())
def test_any_bytes_give_lawful_indices_or_a_refusal(codec: IndexCodec, data: st.DataObject) -> None:
    huge = st.sampled_from([8] if codec is BITMAP else [BEYOND_INT32, 2**61])
    span = data.draw(st.integers(1, 40) | huge)
    capacity = data.draw(st.integers(0, min(span, 6)))
    world = data.draw(st.integers(1, 3))
    size = codec.predict_size(capacity, span)
    message = data.draw(st.binary(min_size=world * size, max_size=world * size))
    count = st.integers(-1, capacity + 1) | st.sampled_from([-(2**63), 2**63 - 1])
    counts = np.array(data.draw(st.lists(count, min_size=world, max_size=world)), np.int64)
    rows = np.frombuffer(message, np.uint8).reshape(world, size)
    check_lawful_or_refused(codec, rows, counts, capacity, span)


@given(flips=st.lists(st.integers(0, 8 * ELIAS_FANO.predict_size(6, 100) - 1), min_size=1, max_size=3))
def test_a_few_flipped_bits_give_lawful_indices_or_a_refusal(flips: list[int]) -> None:
    """Random bytes seldom have the right number of ones; a good row with flipped bits goes further in."""
    row = encoded(ELIAS_FANO, [3, 4, 50, 98, 99], 6, 100).numpy()
    for flip in flips:
        row[flip // 8] ^= 1 << flip % 8
    check_lawful_or_refused(ELIAS_FANO, row[None], np.array([5]), 6, 100)


def test_a_row_full_of_ones_takes_no_memory_for_them() -> None:
    """Its bits are laid out as one byte each, and counted before one of them becomes an eight-byte index."""
    span = 1_000_000
    tracemalloc.start()
    with pytest.raises(Malformed):
        BITMAP.decode(np.full((1, BITMAP.predict_size(1, span)), 255, np.uint8), np.array([1]), 1, span)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert span <= peak < 3 * span, "less than was laid out: nothing was measured"


@codecs(*INDEX_CODECS)
@pytest.mark.parametrize("count", [-1, 5, -(2**63), 2**63 - 1])
def test_an_impossible_count_is_refused_and_the_rank_named(codec: IndexCodec, count: int) -> None:
    rows = torch.stack([encoded(codec, [], 4, 50)] * 3).numpy()
    with pytest.raises(Malformed, match=r"rank 2 announced a count outside 0\.\.4"):
        codec.decode(rows, np.array([0, 0, count]), 4, 50)


@codecs(ELIAS_FANO, BITMAP)
@pytest.mark.parametrize("count", [1, 3])
def test_another_number_of_indices_than_announced_is_refused(codec: IndexCodec, count: int) -> None:
    rows = torch.stack([encoded(codec, [1, 2], 4, 50)] * 2).numpy()
    with pytest.raises(Malformed, match="rank 1 sent another number of indices than it announced"):
        codec.decode(rows, np.array([2, count]), 4, 50)


@pytest.mark.parametrize(
    ("codec", "row"),
    [(RAW, [-1, 3]), *((codec, row) for codec in (RAW, ELIAS_FANO) for row in ([3, 3], [4, 3], [49, 50]))],
)
def test_unlawful_indices_are_refused_and_the_rank_named(codec: IndexCodec, row: list[int]) -> None:
    """Elias-Fano can say each of these: low parts come in any order, and the span itself has room."""
    rows = torch.stack([encoded(codec, [48, 49], 2, 50), encoded(codec, row, 2, 50)]).numpy()
    with pytest.raises(
        Malformed, match=r"rank 1 sent indices that are not sorted, unique and inside 0\.\.49"
    ):
        codec.decode(rows, np.array([2, 2]), 2, 50)
