"""Each mend undone makes the state machine of what is seen red."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import pytest
from hypothesis import Phase

from gradsieve.errors import MismatchError
from gradsieve.parallel.ddp import DdpSync
from gradsieve.pipeline import tags
from gradsieve.replica.parameter_views import ParameterViews
from gradsieve.sync import gradient_sync, optimizer_hooks
from gradsieve.sync.gradient_sync import GradientSync
from laws.test_any_order import fake_group, run_machine
from laws.test_any_order_can_fail import nothing_is_applied_meanwhile
from laws.test_what_is_seen import Seen

__all__ = ["fake_group"]

TRIES = 60


def a_forward_leaves_the_own_model_in_place(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DdpSync, "after_forward", lambda self, module: self._forwards.clear())


def a_backward_leaves_the_own_model_in_place(patch: pytest.MonkeyPatch) -> None:
    show_shared = ParameterViews.show_shared

    def after_steps_only(self: ParameterViews, names: Any = None, *, raise_version: bool = True) -> None:
        if raise_version:
            show_shared(self, names)

    patch.setattr(ParameterViews, "show_shared", after_steps_only)


def a_backward_runs_on_the_shared_model(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DdpSync, "begin_backward", lambda self: None)


def who_skips_a_step_takes_over_later(patch: pytest.MonkeyPatch) -> None:
    """As it was: with the optimizer's step."""
    nothing_is_applied_meanwhile(patch)

    def end_backward(self: DdpSync, completed: bool, frees_graph: bool) -> None:
        self.replica.views.show_shared(self._in_backward, raise_version=False)
        self._in_backward, self._belongs = frozenset(), False

    patch.setattr(DdpSync, "end_backward", end_backward)


def hooks_of_users_come_first(patch: pytest.MonkeyPatch) -> None:
    def behind(optimizer: Any) -> None:
        if optimizer not in optimizer_hooks._after_handles:
            optimizer_hooks._after_handles[optimizer] = optimizer.register_step_post_hook(
                optimizer_hooks._after
            )

    patch.setattr(optimizer_hooks, "_be_first_after", behind)


def a_step_that_raised_is_not_put_right(patch: pytest.MonkeyPatch) -> None:
    before_update = GradientSync.before_update
    patch.setattr(DdpSync, "before_update", before_update)


def a_forward_is_taken_for_a_promise(patch: pytest.MonkeyPatch) -> None:
    """An exchange that began with one rank's forward is as good as any other."""
    patch.setattr(gradient_sync, "UnmatchedError", type("Never", (Exception,), {}))
    patch.setattr(tags, "UnmatchedError", MismatchError)


def a_forward_counts_as_a_step(patch: pytest.MonkeyPatch) -> None:
    """Of the period, though no backward may follow."""
    begin = DdpSync._begin

    def counted(self: DdpSync) -> None:
        if not self._begun and not self.pipeline.is_last_of_period:
            self.pipeline.since += 1
        begin(self)

    patch.setattr(DdpSync, "_begin", counted)


def optimizers_own_what_they_had_at_first(patch: pytest.MonkeyPatch) -> None:
    """Of one optimizer for two networks, one network's sync alone hears."""
    concerned = optimizer_hooks._concerned
    patch.setattr(optimizer_hooks, "_concerned", lambda optimizer: concerned(optimizer)[:1])


def a_backward_in_evaluation_mode_is_remembered(patch: pytest.MonkeyPatch) -> None:
    before_forward = DdpSync.before_forward

    def sticky(self: DdpSync, module: Any) -> None:
        before_forward(self, module)
        if not module.training:
            self.replica.views.show_own()

    patch.setattr(DdpSync, "before_forward", sticky)


def nobody_waits_for_an_exchange(patch: pytest.MonkeyPatch) -> None:
    """Not even at the end of the backward that it belongs to."""

    def complete_if_due(self: GradientSync, names: Set[str] = frozenset()) -> None:
        if self._pending is None:
            self.complete(names)

    patch.setattr(GradientSync, "complete_if_due", complete_if_due)


def idle_exchanges_move_the_step(patch: pytest.MonkeyPatch) -> None:
    """One that was dropped counts."""
    forget = DdpSync.forget_exchange

    def counted(self: DdpSync) -> None:
        forget(self)
        self.pipeline.step += 1

    patch.setattr(DdpSync, "forget_exchange", counted)


MUTANTS = [
    a_forward_leaves_the_own_model_in_place,
    a_backward_leaves_the_own_model_in_place,
    a_backward_runs_on_the_shared_model,
    who_skips_a_step_takes_over_later,
    hooks_of_users_come_first,
    a_step_that_raised_is_not_put_right,
    a_forward_is_taken_for_a_promise,
    a_forward_counts_as_a_step,
    optimizers_own_what_they_had_at_first,
    a_backward_in_evaluation_mode_is_remembered,
    nobody_waits_for_an_exchange,
    idle_exchanges_move_the_step,
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_mend_undone_is_red(mutant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    with pytest.raises(BaseException) as found:  # noqa: PT011 - what breaks first is the mutant's business
        run_machine(Seen, TRIES, phases=[Phase.generate])
    assert not isinstance(found.value, KeyboardInterrupt | SystemExit)
