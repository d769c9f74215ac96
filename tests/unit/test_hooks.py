"""Which optimizers' steps are noticed, and when."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradsieve.errors import ConfigError
from gradsieve.hooks import OptimizerHooks


class Notes:
    """A listener that writes down what it hears."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, list[str]]] = []

    def before_update(self, names: Set[str], optimizer: Any) -> None:
        self.heard.append(("before", sorted(names)))

    def after_update(self, names: Set[str]) -> None:
        self.heard.append(("after", sorted(names)))


@pytest.fixture
def parameters() -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(torch.ones(3)) for name in ("a", "b")}


def with_gradient(parameters: dict[str, nn.Parameter]) -> None:
    for parameter in parameters.values():
        parameter.grad = torch.ones(3)


def test_every_optimizer_of_these_parameters_is_heard_and_no_other(
    parameters: dict[str, nn.Parameter],
) -> None:
    notes = Notes()
    watch = OptimizerHooks(parameters, notes)
    watch.register()
    with_gradient(parameters)
    torch.optim.SGD([parameters["b"]], lr=0.1).step()
    torch.optim.Adam(parameters.values(), lr=0.1).step()
    stranger = nn.Parameter(torch.ones(3))
    torch.optim.SGD([stranger], lr=0.1).step()
    assert notes.heard == [("before", ["b"]), ("after", ["b"]), ("before", ["a", "b"]), ("after", ["a", "b"])]
    watch.remove()
    torch.optim.SGD(parameters.values(), lr=0.1).step()
    assert len(notes.heard) == 4


@pytest.mark.parametrize("by_name", [False, True])
def test_a_closure_comes_first_and_its_result_comes_back(
    parameters: dict[str, nn.Parameter], by_name: bool
) -> None:
    notes = Notes()
    watch = OptimizerHooks(parameters, notes)
    watch.register()

    def closure() -> Tensor:
        notes.heard.append(("closure", []))
        with_gradient(parameters)
        return torch.tensor(7.0)

    optimizer = torch.optim.SGD(parameters.values(), lr=0.5)
    result = optimizer.step(closure=closure) if by_name else optimizer.step(closure)
    assert float(result) == 7.0
    assert [what for what, _ in notes.heard] == ["closure", "before", "after"]
    assert torch.equal(parameters["a"].detach(), torch.full((3,), 0.5))
    watch.remove()


def test_a_closure_that_is_evaluated_twice_is_refused(parameters: dict[str, nn.Parameter]) -> None:
    class Twice(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            closure()
            return super().step(closure)

    watch = OptimizerHooks(parameters, notes := Notes())
    watch.register()
    with pytest.raises(ConfigError, match="evaluates its closure several times a step"):
        Twice(parameters.values(), lr=0.1).step(lambda: torch.zeros(()))
    watch.remove()
    assert notes.heard
