"""Vectors in rows of few bits: in pieces they are what they are as a whole, to the bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gradsieve import kernels
from gradsieve.kernels.blocks import block_layout
from gradsieve.testing.laws import same_bits
from gradsieve.types import Sparse
from gradsieve.wire import values as module
from gradsieve.wire.values import VALUE_CODECS, EncodedVector, RoundedSum, RowLayout, ValueCodec

NAMES = ["bf16", "int8", "int4", "int2", "sign"]
CPU = torch.device("cpu")

every_codec = pytest.mark.parametrize("name", NAMES)
every_form = pytest.mark.parametrize("form", ["torch", "compiled"])
every_cut = pytest.mark.parametrize("cut", [False, True], ids=["even", "cut"])
every_count = pytest.mark.parametrize("count", [0, 1, 5, 255, 256, 771, 1024, 1537, 5000])


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TOGETHER", 512)


SIZES = {0: (), 1: (1,), 5: (5,), 255: (200, 55), 771: (256, 1, 0, 514), 5000: (1300, 3, 700, 2997)}
"""By count, of tensors that a vector is made of."""


def shape_of(name: str, count: int, rows: int = 3, cut: bool = False) -> RowLayout:
    blocks = block_layout(SIZES.get(count, (count,))).between(0, count) if cut else None
    return RowLayout(VALUE_CODECS[name], rows, count, torch.float32, CPU, blocks)


def by_row(shape: RowLayout, values: Tensor) -> list[tuple[ValueCodec, Tensor]]:
    parts = values.split([blocks.count for blocks in shape.rows_of_blocks])
    return [
        (shape.codec.over(blocks), part) for blocks, part in zip(shape.rows_of_blocks, parts, strict=True)
    ]


def filled_up(rows: list[Tensor], shape: RowLayout) -> Tensor:
    assert max(row.numel() for row in rows) == shape.size, "no longer than it has to be"
    return torch.stack([torch.nn.functional.pad(row, (0, shape.size - row.numel())) for row in rows])


@every_form
@every_codec
@every_count
@every_cut
def test_rows_written_and_read_in_pieces_are_those_of_the_codec(
    form: str, name: str, count: int, cut: bool
) -> None:
    shape, values = shape_of(name, count, cut=cut), torch.randn(count)
    with kernels.using(form):
        rows = shape.encode(lambda first, last: values[first:last])
        whole = [codec.encode(part) for codec, part in by_row(shape, values)]
        assert same_bits(rows, filled_up(whole, shape))
        stream = EncodedVector(shape, rows)
        back = Sparse.run(7, stream, count + 9)
        assert (back.count, stream.dtype, stream.device) == (count, torch.float32, CPU)
        expected = [
            codec.decode(row, part.numel(), torch.float32)
            for row, (codec, part) in zip(whole, by_row(shape, values), strict=True)
        ]
        assert same_bits(back.values, torch.cat(expected))
        assert max((piece.numel() for piece in back.pieces()), default=0) <= 512


@every_form
@every_codec
@every_count
@every_cut
def test_who_rounds_a_sum_has_given_what_that_added(form: str, name: str, count: int, cut: bool) -> None:
    shape = shape_of(name, count, cut=cut)
    start, stop = shape.starts[1:3]
    codec, width = shape.codec.over(shape.rows_of_blocks[1]), stop - start
    with kernels.using(form):
        rows = shape.encode(lambda first, last: torch.randn(last - first))
        arrived = codec.encode(torch.randn(3, width))
        sent = torch.nn.functional.pad(arrived, (0, shape.size - arrived.shape[1]))
        total = shape.add_up(1, sent)
        exact = codec.decode_sum(arrived, width, torch.float32)
        assert same_bits(total[: arrived.shape[1]], codec.encode(exact))
        assert not bool(total[arrived.shape[1] :].any())
        told = Sparse.run(0, EncodedVector(shape, rows), count).values
        told[start:stop] += codec.decode(total[: arrived.shape[1]], width, torch.float32) - exact
        given = EncodedVector(shape, rows, RoundedSum(1, sent, total))
        assert same_bits(Sparse.run(0, given, count).values, told)


@every_codec
@every_cut
@pytest.mark.parametrize("odd", [torch.nan, torch.inf, -torch.inf, 3.4e38, 2e38, 1.0])
@pytest.mark.parametrize("zeros", [False, True])
def test_where_bounds_are_finite_all_values_are(name: str, odd: float, cut: bool, zeros: bool) -> None:
    shape = shape_of(name, 5000, cut=cut)
    for place in (0, 701, 4999):
        values = torch.randn(5000)
        if zeros:
            values[::3] = 0.0
        values[place] = odd
        stream = EncodedVector(shape, shape.encode(lambda first, last, values=values: values[first:last]))
        bounds = kernels.is_finite(stream.bounds())
        assert bounds or abs(odd) != 1.0
        assert not bounds or all(kernels.is_finite(piece) for piece in stream.pieces())
        assert not bounds or abs(odd) < torch.inf


@every_codec
def test_rows_are_as_equal_as_whole_blocks_allow_and_no_block_has_two_tensors(name: str) -> None:
    for sizes in SIZES.values():
        shape = shape_of(name, sum(sizes), rows=4, cut=True)
        lengths = [blocks.count for blocks in shape.rows_of_blocks]
        assert sum(lengths) == sum(sizes)
        assert max(lengths) <= sum(sizes) / 4 + 256
        edges = {place for blocks in shape.rows_of_blocks for place in (blocks.start, blocks.stop)}
        starts = torch.tensor([0, *sizes]).cumsum(0).tolist()
        assert all(min(edge - start for start in starts if start <= edge) % 256 == 0 for edge in edges)
