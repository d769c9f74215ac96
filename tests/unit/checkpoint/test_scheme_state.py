"""State as a flat dictionary of tensors and back: nothing changes on the way, nothing strange comes in."""

from __future__ import annotations

import io
from dataclasses import dataclass, fields, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gradsieve.checkpoint.fields import fields_from_tensors, take_text, text_to_tensor
from gradsieve.comm import lockstep
from gradsieve.errors import Malformed
from gradsieve.schemes import SCHEMES, make
from gradsieve.types import Ctx, fields_to_tensors


@dataclass(frozen=True)
class Everything:
    whole: int
    real: float
    vector: Tensor
    flags: Tensor


def everything(whole: int = 3, real: float = 0.1) -> Everything:
    return Everything(whole, real, torch.arange(4.0), torch.tensor([True, False]))


def through_a_file(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    file = io.BytesIO()
    torch.save(stored, file)
    file.seek(0)
    loaded: dict[str, Tensor] = torch.load(file, weights_only=True)
    return loaded


def assert_same_fields(left: object, right: object) -> None:
    assert type(left) is type(right)
    for field in fields(left):  # type: ignore[arg-type]
        one, other = getattr(left, field.name), getattr(right, field.name)
        assert type(one) is type(other), field.name
        if isinstance(one, Tensor):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
        else:
            assert repr(one) == repr(other), field.name  # NaN, and -0.0


@given(
    whole=st.integers(-(2**63), 2**63 - 1),
    real=st.floats(allow_nan=True, allow_infinity=True, allow_subnormal=True),
)
def test_numbers_and_tensors_come_back_as_they_were(whole: int, real: float) -> None:
    state = everything(whole, real)
    stored = through_a_file(fields_to_tensors(state, "here/"))
    assert set(stored) == {"here/whole", "here/real", "here/vector", "here/flags"}
    assert_same_fields(fields_from_tensors(everything(), stored, "here/"), state)


@pytest.mark.parametrize("name", SCHEMES)
def test_the_state_of_every_scheme_comes_back_after_some_steps(name: str) -> None:
    scheme, world, n = make(name, 0.05), 3, 700
    states = [scheme.begin(n, world)] * world
    for step in range(6):
        source = torch.Generator().manual_seed(step)
        accs = [torch.randn(n, generator=source) for _ in range(world)]
        contexts = [Ctx(rank, world, step) for rank in range(world)]
        outcomes = lockstep.run([scheme.exchange(accs[c.rank], states[c.rank], c) for c in contexts])
        states = [scheme.next_states([outcome.state])[0] for outcome in outcomes]
    stored = through_a_file(fields_to_tensors(states[0], "unit/0/"))
    assert_same_fields(fields_from_tensors(scheme.begin(n, world), stored, "unit/0/"), states[0])


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("whole", None, "has no 'x/whole'"),
        ("whole", torch.tensor(3.0), "'x/whole' in the checkpoint is not a tensor of torch.int64"),
        ("whole", torch.tensor([3]), r"'x/whole' in the checkpoint has shape \(1,\), expected \(\)"),
        ("real", torch.tensor(3.0), "not a tensor of torch.float64"),
        ("vector", torch.zeros(5), r"has shape \(5,\), expected \(4,\)"),
        ("vector", torch.zeros(4, dtype=torch.float64), "not a tensor of torch.float32"),
        ("flags", b"\x01\x00", "not a tensor of torch.bool"),
        ("vector", torch.zeros(4, device="meta"), r"has no data \(device meta\)"),
    ],
)
def test_what_does_not_fit_is_refused_with_key_and_reason(key: str, value: object, words: str) -> None:
    stored: dict[str, object] = {**fields_to_tensors(everything(), "x/"), f"x/{key}": value}
    if value is None:
        del stored[f"x/{key}"]
    with pytest.raises(Malformed, match=words):
        fields_from_tensors(everything(), stored, "x/")  # type: ignore[arg-type]


def test_a_checkpoint_comes_to_the_device_of_the_run() -> None:
    """There is one with data here: that of the run stands for another, and is asked for."""
    run = replace(everything(), vector=torch.zeros(4, device="meta"))
    loaded = fields_from_tensors(run, fields_to_tensors(everything(), "x/"), "x/")
    assert loaded.vector.device.type == "meta"
    assert loaded.flags.device.type == "cpu"


@given(text=st.text(alphabet=st.characters(exclude_categories=["C", "Z"]), max_size=16))
def test_text_comes_back(text: str) -> None:
    tensor = text_to_tensor(text)
    assert tensor.dtype == torch.uint8
    assert take_text({"a": tensor}, "a") == text


def test_bytes_that_are_no_text_do_not_break_the_message() -> None:
    assert take_text({"a": torch.tensor([255, 68], dtype=torch.uint8)}, "a").endswith("D")
