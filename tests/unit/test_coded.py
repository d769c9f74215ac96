"""Vectors in rows of few bits: in pieces they are what they are as a whole, to the bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gradsieve import kernels
from gradsieve.types import Sparse
from gradsieve.wire import coded
from gradsieve.wire.coded import Coded, Shape, Sum
from gradsieve.wire.values import VALUE_CODECS
from laws.checks import same_bits

NAMES = ["bf16", "int8", "int4", "int2", "sign"]
CPU = torch.device("cpu")

every_codec = pytest.mark.parametrize("name", NAMES)
every_form = pytest.mark.parametrize("form", ["torch", "compiled"])
every_count = pytest.mark.parametrize("count", [0, 1, 5, 255, 256, 771, 1024, 1537, 5000])


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coded, "TOGETHER", 512)


def shape_of(name: str, count: int, rows: int = 3) -> Shape:
    return Shape(VALUE_CODECS[name], rows, count, torch.float32, CPU)


def filled_up(values: Tensor, shape: Shape) -> Tensor:
    spare = shape.rows * shape.width - values.numel()
    return torch.nn.functional.pad(values, (0, spare)).view(shape.rows, shape.width)


@every_form
@every_codec
@every_count
def test_rows_written_and_read_in_pieces_are_those_of_the_codec(form: str, name: str, count: int) -> None:
    shape, values = shape_of(name, count), torch.randn(count)
    with kernels.using(form):
        rows = shape.encode(lambda first, last: values[first:last])
        whole = shape.codec.encode(filled_up(values, shape))
        assert same_bits(rows, whole)
        stream = Coded(shape, rows)
        back = Sparse.run(7, stream, count + 9)
        assert (back.count, stream.dtype, stream.device) == (count, torch.float32, CPU)
        expected = shape.codec.decode(whole, shape.width, torch.float32).flatten()[:count]
        assert same_bits(back.values, expected)
        assert max((piece.numel() for piece in back.pieces()), default=0) <= 512


@every_form
@every_codec
@every_count
def test_who_rounds_a_sum_has_given_what_that_added(form: str, name: str, count: int) -> None:
    shape = shape_of(name, count)
    with kernels.using(form):
        rows = shape.codec.encode(torch.randn(3, shape.width))
        total = shape.add_up(rows)
        exact = shape.codec.decode_sum(rows, shape.width, torch.float32)
        assert same_bits(total, shape.codec.encode(exact))
        told = shape.codec.decode(rows, shape.width, torch.float32)
        told[1] += shape.codec.decode(total, shape.width, torch.float32) - exact
        given = Coded(shape, rows, Sum(1, rows, total))
        assert same_bits(Sparse.run(0, given, count).values, told.flatten()[:count])


@every_codec
@pytest.mark.parametrize("odd", [torch.nan, torch.inf, -torch.inf, 3.4e38, 2e38, 1.0])
def test_where_bounds_are_finite_all_values_are(name: str, odd: float) -> None:
    shape = shape_of(name, 3000)
    for place in (0, 700, 2999):
        values = torch.randn(3000)
        values[place] = odd
        stream = Coded(shape, shape.codec.encode(filled_up(values, shape)))
        bounds = kernels.is_finite(stream.bounds())
        assert bounds or abs(odd) != 1.0
        assert not bounds or all(kernels.is_finite(piece) for piece in stream.pieces())
        assert not bounds or abs(odd) < torch.inf
