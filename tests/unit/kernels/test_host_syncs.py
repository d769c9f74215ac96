"""How often ExDyna makes the host wait for the device: once a bucket.

There is no GPU here. What would wait on one is known: reading a number, and shapes that depend on data. A
dispatch mode sees both on the CPU, and the one place where rows are handed to the host is counted beside it.
The form of selection is the one for accelerators.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gradsieve import kernels
from gradsieve.comm import lockstep
from gradsieve.kernels import torch_passes
from gradsieve.schemes import exclusive, make
from gradsieve.types import Ctx, Program

aten = torch.ops.aten
WAITING = {
    aten._local_scalar_dense,
    aten.nonzero,
    aten.masked_select,
    aten.unique_consecutive,
    aten._unique2,
    aten.unique_dim,
    aten.bincount,
    aten.equal,
    aten.is_nonzero,
    aten.repeat_interleave,
}


class Watch(TorchDispatchMode):
    """Counts what a host would wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = func.overloadpacket
        masked = packet in (aten.index, aten.index_put_) and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if packet in WAITING or masked:
            self.seen.append(str(packet))
        return func(*args, **(kwargs or {}))


def watched(program: Program[Any], watch: Watch) -> Program[Any]:
    reply: Any = None
    while True:
        with watch:
            try:
                op = program.send(reply)
            except StopIteration as end:
                return end.value
        reply = yield op


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    watch, to_host = Watch(), exclusive.to_host

    def counted(tensor: torch.Tensor) -> Any:
        watch.seen.append("to_host")
        return to_host(tensor)

    monkeypatch.setattr(exclusive, "to_host", counted)
    monkeypatch.setattr(exclusive, "select", torch_passes.select_without_waiting)
    with kernels.using("torch"):
        yield watch


def steps(name: str, watch: Watch, count: int, **settings: Any) -> list[list[str]]:
    """What rank 1 of 3 waited for in each step."""
    scheme, n, world = type(make(name, 0.01))(density=0.01, **settings), 5001, 3
    states = [scheme.begin(n, world) for _ in range(world)]
    seen = []
    for step in range(count):
        accs = [torch.randn(n, generator=torch.Generator().manual_seed(7 * step + r)) for r in range(world)]
        programs = [scheme.exchange(accs[r], states[r], Ctx(r, world, step)) for r in range(world)]
        programs[1] = watched(programs[1], watch)
        before = len(watch.seen)
        mine = [outcome.state for outcome in lockstep.run(programs)]
        # `to_host` of all ranks goes through one function: two of three are the others'.
        others = [place for place, what in enumerate(watch.seen) if what == "to_host" and place >= before]
        for place in reversed(others[1:]):
            del watch.seen[place]
        seen.append(watch.seen[before:])
        states = [scheme.next_states([state])[0] for state in mine]
    return seen


@pytest.mark.parametrize("name", ["exdyna", "micro"])
@pytest.mark.parametrize("values", ["exact", "bf16", "int8"])
def test_a_bucket_makes_the_host_wait_once(name: str, values: str, watch: Watch) -> None:
    first, *tracking = steps(name, watch, 6, values=values)
    assert tracking == [["to_host"]] * 5
    assert len(first) > 1, "the first step looks for a threshold: an exact selection, which waits"


def test_the_published_form_waits_more_often(watch: Watch) -> None:
    """The twin: what is counted can be more than one."""
    *_, last = steps("exdyna-paper", watch, 2)
    assert len(last) > 1
