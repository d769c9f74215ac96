"""Files of tensors: what is written comes back, what is strange is refused, and neither takes much memory."""

from __future__ import annotations

import tracemalloc
from collections.abc import Mapping

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gradsieve.checkpoint.tensors import ALWAYS, DTYPES, PADDING, pieces, tensors_in
from gradsieve.checkpoint.tree import put_together, taken_apart
from gradsieve.errors import ConfigError, Malformed


def written(tensors: Mapping[str, Tensor], room: int = 0) -> bytearray:
    return bytearray(b"".join(pieces(tensors, room)))


def of_all_kinds() -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(1)
    numbers = torch.randint(0, 2, (3, 5), generator=source)
    tensors = {f"kind/{name}": numbers.to(dtype) for name, dtype in DTYPES.items()}
    return tensors | {
        "none": torch.zeros(0, 7),
        "one": torch.tensor(2.5),
        'a "name", ~é': torch.ones(2).bfloat16(),
    }


def test_the_layout_is_that_of_safetensors() -> None:
    """The library reads what is written here, and the reverse."""
    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    tensors = of_all_kinds()
    for there in (
        safetensors.load(bytes(written(tensors))),
        tensors_in(bytearray(safetensors.save(tensors))),
    ):
        assert there.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert there[name].dtype == tensor.dtype
            assert torch.equal(there[name], tensor)


def test_many_tiny_tensors_are_padded_so_that_they_can_be_read() -> None:
    tensors = {f"x{number}": torch.tensor([number % 7], dtype=torch.uint8) for number in range(1500)}
    content = written(tensors)
    assert int.from_bytes(content[:8], "little") > ALWAYS
    read = tensors_in(content)
    assert set(read) == {*tensors, PADDING}
    assert int(read["x1004"]) == 1004 % 7


def test_a_type_that_the_layout_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="complex64"):
        written({"x": torch.zeros(2, dtype=torch.complex64)})


def with_header(header: str, data: bytes = bytes(8)) -> bytearray:
    padded = header.ljust(-(-len(header) // 8) * 8).encode()
    return bytearray(len(padded).to_bytes(8, "little") + padded + data)


def line(name: str = "x", dtype: str = "F32", shape: str = "2", begin: int = 0, end: int = 8) -> str:
    return f'"{name}":{{"dtype":"{dtype}","shape":[{shape}],"data_offsets":[{begin},{end}]}}'


MISPLACED = "not where, or as long as|beyond its end"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (bytearray(), "cannot be that of a file"),
        (bytearray(7), "cannot be that of a file"),
        (bytearray((1 << 63).to_bytes(8, "little")), "cannot be that of a file"),
        (bytearray((3).to_bytes(8, "little") + b"{} "), "cannot be that of a file"),
        (with_header("{}", b""), "holds 0 bytes"),
        (with_header("[]"), "not one of tensors"),
        (with_header("{" + line() + "} {}"), "not JSON"),
        (with_header("{" + line() + "," + "}"), "not JSON"),
        (with_header('{"__metadata__":{"a":"b"},' + line() + "}"), "entry 0"),
        (with_header("{" + line(dtype="F99") + "}"), "entry 0"),
        (with_header("{" + line(shape="3") + "}"), MISPLACED),
        (with_header("{" + line(shape="-2") + "}"), "entry 0"),
        (with_header("{" + line(shape="true") + "}"), "entry 0"),
        (with_header("{" + line(shape="NaN") + "}"), "entry 0"),
        (with_header("{" + line(shape="1e3") + "}"), "entry 0"),
        (with_header("{" + line(shape="9" * 400) + "}"), "impossible shape"),
        (with_header("{" + line(shape="1048576,1048576") + "}"), "beyond its end"),
        (with_header("[" * 30_000), "not JSON"),
        (with_header("{" + line(shape=",".join(["1"] * 17)) + "}"), "impossible shape"),
        (with_header("{" + line(shape="999999999999999,999999999999999,0", end=0) + "}"), "impossible shape"),
        (with_header("{" + line(begin=4, end=12) + "}"), MISPLACED),
        (with_header("{" + line(end=8) + "}", bytes(9)), "holds 9 bytes of tensors"),
        (
            with_header("{" + line() + "," + line("y", begin=4, end=12) + "}"),
            MISPLACED,
        ),
        (with_header("{" + line() + "," + line(begin=8, end=16) + "}", bytes(16)), "not JSON"),
        (
            with_header("{" + line("\\u0041") + "," + line("A", begin=8, end=16) + "}", bytes(16)),
            "not JSON",
        ),
        (
            with_header("{" + line("a", "U8", "1", 0, 1) + "," + line(begin=1, end=9) + "}", bytes(9)),
            "at byte 1",
        ),
        (with_header("{" + line() + "}" + " " * ALWAYS), "cannot be that of a file"),
    ],
)
def test_what_is_strange_is_refused(content: bytearray, words: str) -> None:
    with pytest.raises(Malformed, match=words):
        tensors_in(content)


def test_bytes_that_are_no_truth_values_are_refused() -> None:
    content = with_header("{" + line(dtype="BOOL", shape="8") + "}", bytes([0, 1, 2, 0, 0, 0, 0, 0]))
    with pytest.raises(Malformed, match="neither true nor false"):
        tensors_in(content)


@given(data=st.data())
def test_no_mutation_of_a_file_gets_further_than_a_refusal(data: st.DataObject) -> None:
    content = written(of_all_kinds())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(content) - 1))
        content[place] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(0, len(content)))]
    try:
        for tensor in tensors_in(content).values():
            tensor.double().sum()
    except Malformed:
        pass


@pytest.mark.parametrize("count", [900, 6000])
def test_the_longest_header_takes_less_than_twice_the_file_and_a_mebibyte(count: int) -> None:
    """As long as it may be without padding, and with as little as there has to be."""
    one = torch.zeros(1, dtype=torch.uint8)
    content = written({f"{number:x}": one for number in range(count)})
    tracemalloc.start()
    tensors_in(content)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(content) + peak < 2 * len(content) + (1 << 20)


def test_nested_state_comes_back_as_it_was() -> None:
    tree = {
        "state": {0: {"step": torch.tensor(3.0), "none": None}, 7: {}},
        "param_groups": [
            {"lr": 0.1, "betas": (0.9, float("inf")), "on": True, "name": 'a"b', "params": [0, 7]}
        ],
    }
    text, tensors = taken_apart(tree)
    assert put_together(text, tensors) == tree
    assert type(put_together(text, tensors)["param_groups"][0]["betas"]) is tuple


@pytest.mark.parametrize(
    "text",
    ["", "[" * 100_000, '{"tensor":1}', '{"tensor":-1}', '{"tensor":true}', '{"tuple":3}', "{}", '{"a":1}',
     '{"dict":[[[],1]]}', '{"dict":[[1]]}', '{"tuple":[],"dict":[]}'],
)  # fmt: skip
def test_a_text_that_is_no_nested_state_is_refused(text: str) -> None:
    with pytest.raises(Malformed, match="nested state"):
        put_together(text, [torch.zeros(1)])


def test_state_that_only_pickle_could_save_is_refused() -> None:
    with pytest.raises(ConfigError, match="object cannot be saved without pickle"):
        taken_apart({"state": object()})
