"""Each mend undone makes the state machine of what is seen red."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import pytest
from hypothesis import Phase

from gradsieve.hooks import OptimizerHooks
from gradsieve.parallel.ddp import DdpSync
from gradsieve.replica.parameter_views import ParameterViews
from gradsieve.sync.gradient_sync import GradientSync
from laws.test_any_order import fake_group, run_machine
from laws.test_any_order_can_fail import nothing_is_applied_meanwhile
from laws.test_what_is_seen import Seen

__all__ = ["fake_group"]

TRIES = 60


def a_forward_leaves_the_own_model_in_place(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DdpSync, "after_forward", lambda self, *_: self._forwards.clear())


def a_backward_leaves_the_own_model_in_place(patch: pytest.MonkeyPatch) -> None:
    show_shared = ParameterViews.show_shared

    def after_steps_only(self: ParameterViews, names: Any = None, *, raise_version: bool = True) -> None:
        if raise_version:
            show_shared(self, names)

    patch.setattr(ParameterViews, "show_shared", after_steps_only)


def a_backward_runs_on_the_shared_model(patch: pytest.MonkeyPatch) -> None:
    after_forward = DdpSync.after_forward

    def resting(self: DdpSync, module: Any, output: Any) -> None:
        after_forward(self, module, output)
        self.replica.views.show_shared(raise_version=False)

    patch.setattr(DdpSync, "after_forward", resting)


def who_skips_a_step_takes_over_later(patch: pytest.MonkeyPatch) -> None:
    """As it was: with the optimizer's step."""
    nothing_is_applied_meanwhile(patch)

    def backward_ended(self: DdpSync) -> None:
        self.replica.views.show_shared(raise_version=False)
        self._rest()

    patch.setattr(DdpSync, "backward_ended", backward_ended)


def hooks_of_users_come_first(patch: pytest.MonkeyPatch) -> None:
    def behind(self: OptimizerHooks, optimizer: Any) -> None:
        if optimizer not in self._after:
            self._after[optimizer] = optimizer.register_step_post_hook(self.after)

    patch.setattr(OptimizerHooks, "come_first", behind)


def a_step_that_raised_is_not_put_right(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DdpSync, "_end_what_broke_off", lambda self: None)


def a_forward_is_taken_for_a_promise(patch: pytest.MonkeyPatch) -> None:
    """An exchange begins with a forward, which may be of one rank alone."""
    before_forward = DdpSync.before_forward

    def promised(self: DdpSync, module: Any) -> None:
        before_forward(self, module)
        if module.training and self._pending is None and self.pipeline.begins_exchange():
            self.start_exchange()

    patch.setattr(DdpSync, "before_forward", promised)


def a_forward_counts_as_a_step(patch: pytest.MonkeyPatch) -> None:
    """Of the period, though no backward may follow."""
    before_forward = DdpSync.before_forward

    def counted(self: DdpSync, module: Any) -> None:
        before_forward(self, module)
        self.pipeline.since += module.training

    patch.setattr(DdpSync, "before_forward", counted)


def optimizers_own_what_they_had_at_first(patch: pytest.MonkeyPatch) -> None:
    """Of one optimizer for two networks, one network's sync alone hears."""
    names_in, owners = OptimizerHooks.names_in, dict[Any, OptimizerHooks]()

    def of_the_first(self: OptimizerHooks, optimizer: Any) -> Set[str]:
        found = names_in(self, optimizer)
        return found if found and owners.setdefault(optimizer, self) is self else frozenset()

    patch.setattr(OptimizerHooks, "names_in", of_the_first)


def a_backward_in_evaluation_mode_is_remembered(patch: pytest.MonkeyPatch) -> None:
    before_forward = DdpSync.before_forward

    def sticky(self: DdpSync, module: Any) -> None:
        before_forward(self, module)
        if not module.training:
            self.replica.views.show_own()

    patch.setattr(DdpSync, "before_forward", sticky)


def nobody_waits_for_an_exchange(patch: pytest.MonkeyPatch) -> None:
    """Not even at the end of the backward that it belongs to."""

    patch.setattr(GradientSync, "complete_if_due", lambda self: None)


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
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_mend_undone_is_red(mutant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    with pytest.raises(BaseException) as found:  # noqa: PT011 - what breaks first is the mutant's business
        run_machine(Seen, TRIES, phases=[Phase.generate])
    assert not isinstance(found.value, KeyboardInterrupt | SystemExit)
