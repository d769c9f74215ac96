"""Each mend undone makes the state machine red: `pytest tests/laws/test_any_order_can_fail.py`."""

from __future__ import annotations

from collections.abc import Set
from concurrent.futures import wait
from typing import Any

import pytest
from hypothesis import Phase
from torch import Tensor

from gradsieve import MismatchError, hooks
from gradsieve.feedback import local_steps
from gradsieve.feedback.local_steps import LocalSteps
from gradsieve.hooks import OptimizerHooks
from gradsieve.parallel.ddp import DdpSync
from gradsieve.pipeline import StepPipeline, base
from gradsieve.pipeline.tags import Tag
from gradsieve.replica.parameter_views import ParameterViews
from gradsieve.sync import gradient_sync
from gradsieve.sync.gradient_sync import GradientSync
from laws.stepping_ranks import Fleet
from laws.test_any_order import AnyOrder, fake_group, numbers, run_machine

__all__ = ["fake_group"]

TRIES = 300


def x_becomes_w(patch: pytest.MonkeyPatch) -> None:
    """Where all was sent, what an optimizer did meanwhile is overwritten."""

    def apply(
        shared: Tensor, own: Tensor, mark: Tensor, update: Tensor, spent: Tensor, world: int, _: Any
    ) -> None:
        shared -= update / world
        mark.copy_(own)

    patch.setattr(local_steps, "apply", apply)


def closures_are_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    def at_once(closure: Any, then: Any, name: str) -> Any:
        then()
        return closure

    patch.setattr(hooks, "followed_by", at_once)


def no_gradient_is_looked_at(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(gradient_sync.kernels, "is_finite", lambda *_: True)


def every_step_writes_all_parameters(patch: pytest.MonkeyPatch) -> None:
    rebase = StepPipeline.rebase
    patch.setattr(StepPipeline, "rebase", lambda self, names=None: rebase(self))


def a_step_leaves_the_own_model_in_place(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DdpSync, "after_update", GradientSync.after_update)


def evaluating_leaves_the_shared_model_in_place(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DdpSync, "after_forward", lambda self, module, output: self._forwards.pop())


def a_loaded_model_is_taken_for_a_step(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StepPipeline, "adopt", lambda self, names: None)


def only_optimizers_that_were_given_are_heard(patch: pytest.MonkeyPatch) -> None:
    names_in = OptimizerHooks.names_in

    def of_given(self: OptimizerHooks, optimizer: Any) -> Set[str]:
        sync: Any = self.listener()
        return names_in(self, optimizer) if optimizer in sync.replica.optimizers else frozenset()

    patch.setattr(OptimizerHooks, "names_in", of_given)


def nothing_is_applied_meanwhile(patch: pytest.MonkeyPatch) -> None:
    """No mutant: what is applied while backward runs is, whatever becomes of the end of that backward."""
    patch.setattr(ParameterViews, "may_write_shared", False)


def an_interrupted_wait_forgets_the_exchange(patch: pytest.MonkeyPatch) -> None:
    nothing_is_applied_meanwhile(patch)
    complete = GradientSync.complete

    def forgetful(self: GradientSync) -> bool:
        pending, self._pending = self._pending, None
        if pending is not None:
            gradient_sync.wait(pending.futures)
        self._pending = pending
        return complete(self)

    patch.setattr(GradientSync, "complete", forgetful)


def the_end_of_a_backward_does_not_take_over(patch: pytest.MonkeyPatch) -> None:
    nothing_is_applied_meanwhile(patch)

    def without(self: DdpSync) -> None:
        self.replica.views.show_shared(raise_version=False)
        self._rest()

    patch.setattr(DdpSync, "backward_ended", without)


def nothing_is_refreshed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LocalSteps, "rebase", lambda *_: None)


MUTANTS = [
    x_becomes_w,
    closures_are_not_waited_for,
    no_gradient_is_looked_at,
    every_step_writes_all_parameters,
    a_step_leaves_the_own_model_in_place,
    evaluating_leaves_the_shared_model_in_place,
    a_loaded_model_is_taken_for_a_step,
    only_optimizers_that_were_given_are_heard,
    an_interrupted_wait_forgets_the_exchange,
    the_end_of_a_backward_does_not_take_over,
    nothing_is_refreshed,
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_mend_undone_is_red(mutant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    with pytest.raises(BaseException) as found:  # noqa: PT011 - what breaks first is the mutant's business
        run_machine(AnyOrder, TRIES, phases=[Phase.generate])
    assert not isinstance(found.value, KeyboardInterrupt | SystemExit)


# -- tags -----------------------------------------------------------------------------------------------


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
        one.sync._pending = None
    fleet.close()
    assert all(isinstance(error, MismatchError) for error in said), said
    return [str(error) for error in said]


def test_a_flush_on_one_rank_alone_is_named_on_all() -> None:
    for said in flush_on_rank_0_alone():
        assert "rank 0 called flush() after step 0 while ranks 1, 2 went on training" in said


def test_without_tags_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def agree(tag: Tag, *_: Any) -> Any:
        yield from ()

    monkeypatch.setattr(base, "agree", agree)
    with pytest.raises(AssertionError):
        flush_on_rank_0_alone()
