"""Optimizers whose moments are tensors of classes of their own: saved as their parts, and made again from
what the optimizer makes itself, never from what a file says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradsieve.checkpoint.fields import text_to_tensor
from gradsieve.checkpoint.state import _identity, _whole, optimizers_of
from gradsieve.checkpoint.tree import Parts, has_parts, made_like, put_together, taken_apart
from gradsieve.errors import Malformed
from gradsieve.optimizers import state_made_by


class Halves(Tensor):
    """Numbers in bytes with one scale, as quantised moments are."""

    codes: Tensor
    scale: Tensor
    signed: bool

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor, signed: bool) -> Halves:
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)  # type: ignore[attr-defined, no-any-return]

    def __init__(self, codes: Tensor, scale: Tensor, signed: bool) -> None:
        self.codes, self.scale, self.signed = codes, scale, signed

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], self.signed

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> Halves:
        return cls(inner["codes"], inner["scale"], context)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default or func is torch.ops.aten._to_copy.default:
            return args[0]
        raise NotImplementedError(
            f"{func}"
        )  # as `view(dtype)`, which writes a tensor's bytes, is for torchao


class Quantised(Optimizer):
    """Keeps a moment in such a tensor, made in its first step."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    codes = torch.zeros(p.shape, dtype=torch.uint8)
                    state["moment"], state["step"] = Halves(codes, torch.zeros(1), True), 0
                state["step"] += 1
                state["moment"].codes.add_(p.grad.abs().mul(10).to(torch.uint8))
                state["moment"].scale.fill_(state["step"])


def stepped(times: int) -> Quantised:
    optimizer = Quantised([nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(5))])
    for _ in range(times):
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.full_like(p, 0.5)
        optimizer.step()
    return optimizer


def replica_of(optimizer: Optimizer) -> Any:
    return SimpleNamespace(optimizers=[optimizer], held={})


def stored_of(optimizer: Optimizer) -> dict[str, Tensor]:
    """As `shard_of` writes it."""
    text, tensors = taken_apart(_identity(replica_of(optimizer), optimizer) | optimizer.state_dict())
    here = "rank0/optimizer/0/"
    numbered = {f"{here}{place}": each for place, each in enumerate(tensors)}
    return {f"{here}text": text_to_tensor(text), **numbered}


def test_moments_come_back_to_an_optimizer_that_has_not_stepped() -> None:
    saved, fresh = stepped(3), stepped(0)
    (state,) = optimizers_of(replica_of(fresh), stored_of(saved), 0)
    assert not fresh.state  # a copy of it was tried, and not itself
    fresh.load_state_dict(state)
    for group, again in zip(saved.param_groups, fresh.param_groups, strict=True):
        for p, q in zip(group["params"], again["params"], strict=True):
            old, new = saved.state[p], fresh.state[q]
            assert type(new["moment"]) is Halves
            assert new["moment"].signed is True
            assert torch.equal(new["moment"].codes, old["moment"].codes)
            assert torch.equal(new["moment"].scale, old["moment"].scale)
            assert new["step"] == 3


FORGED = [
    ("another name", Parts({"codes": torch.zeros(3, 2, dtype=torch.uint8), "grad": torch.zeros(1)})),
    ("one too few", Parts({"codes": torch.zeros(3, 2, dtype=torch.uint8)})),
    ("another shape", Parts({"codes": torch.zeros(9, dtype=torch.uint8), "scale": torch.zeros(1)})),
    ("another type", Parts({"codes": torch.zeros(3, 2), "scale": torch.zeros(1)})),
    ("no tensor", Parts({"codes": 3, "scale": torch.zeros(1)})),
]


@pytest.mark.parametrize(("what", "parts"), FORGED, ids=[what for what, _ in FORGED])
def test_parts_that_do_not_fit_are_refused(what: str, parts: Parts) -> None:
    with pytest.raises(Malformed):
        made_like({"moment": parts}, state_made_by(stepped(0), 0))


def test_a_file_makes_no_tensor_of_a_class_where_the_optimizer_has_none() -> None:
    """Neither in another place of the state, nor for a parameter that is not there, nor in the groups."""
    good = put_together(*taken_apart(stepped(1).state_dict()))
    assert has_parts(good)
    moment = good["state"][0]["moment"]
    for forged in (
        {**good, "state": {0: {"step": moment}}},
        {**good, "state": {2: {"moment": moment}}},
        {**good, "state": {"0": {"moment": moment}}},
        {**good, "state": {}, "param_groups": [{"lr": moment}]},
    ):
        with pytest.raises(Malformed):
            _loaded(forged)
    _loaded(good)


def _loaded(tree: Any) -> None:
    _whole(tree, stepped(0))
