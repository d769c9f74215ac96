"""Each state machine is red where a fix is undone (`just mutants` undoes the others), and a call on one rank
alone is named on all of them."""

from __future__ import annotations

from concurrent.futures import wait
from typing import Any

import pytest
from hypothesis import Phase
from torch import Tensor

from gradsieve import MismatchError, models
from gradsieve.models import Models
from laws.stepping_ranks import Fleet
from laws.test_any_order import AnyOrder, fake_group, numbers, run_machine
from laws.test_what_is_seen import Seen

__all__ = ["fake_group"]


def x_becomes_w(patch: pytest.MonkeyPatch) -> None:
    """Where all was sent, what an optimizer did meanwhile is overwritten."""

    def apply(shared: Tensor, own: Tensor, mark: Tensor, update: Tensor, spent: Tensor, world: int) -> None:
        shared -= update / world
        mark.copy_(own)

    patch.setattr(models, "apply", apply)


def a_backward_leaves_the_own_model_in_place(patch: pytest.MonkeyPatch) -> None:
    show_shared = Models.show_shared

    def after_steps_only(self: Models, names: Any = None, *, raise_version: bool = True) -> None:
        if raise_version:
            show_shared(self, names)

    patch.setattr(Models, "show_shared", after_steps_only)


@pytest.mark.parametrize(
    ("undone", "machine"),
    [(x_becomes_w, AnyOrder), (a_backward_leaves_the_own_model_in_place, Seen)],
    ids=["any order", "what is seen"],
)
def test_a_fix_undone_is_red(undone: Any, machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    undone(monkeypatch)
    with pytest.raises(BaseException) as found:  # noqa: PT011 - what breaks first is the fault's business
        run_machine(machine, 300, phases=[Phase.generate])
    assert not isinstance(found.value, KeyboardInterrupt | SystemExit)


def flush_on_rank_0_alone() -> list[str]:
    """What every rank is told, where the others go on training."""
    fleet = Fleet(3, "exdyna", 0.3, 1.0)

    def do(rank: int) -> None:
        one = fleet.ranks[rank]
        if rank == 0:
            one.sync.flush()
        else:
            one.ddp(numbers(rank)).backward()
            one.both.step()

    futures = fleet.room.all_of(do)
    wait(futures, timeout=3.0)
    fleet.room.abandon()
    said = [future.exception(timeout=30.0) for future in futures]
    for one in fleet.ranks:
        one.sync.runner.pending = None
    fleet.close()
    assert all(isinstance(error, MismatchError) for error in said), said
    return [str(error) for error in said]


def test_a_flush_on_one_rank_alone_is_named_on_all() -> None:
    for said in flush_on_rank_0_alone():
        assert "rank 0 called flush() after step 0 while ranks 1, 2 went on training" in said
