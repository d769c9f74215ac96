"""Whoever looks at parameters at rest sees the shared model, the same bits on all ranks, and from a training
forward until its backward has ended this rank's own: a state machine over two networks, three optimizers,
averages, hooks and skips.

`just soak` tries 2,000 sequences of 30 actions.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from gradsieve.attached import Phase
from gradsieve.testing.laws import same_bits
from laws.stepping_ranks import RATE, Fleet, OneRank
from laws.test_any_order import fake_group, numbers, run_machine

__all__ = ["fake_group"]

ENOUGH = int(os.environ.get("ANY_ORDER_EXAMPLES", "25"))
seeds = st.integers(0, 10**6)


class Player:
    """What one rank has: two networks, an optimizer for each and one for both, and a moving average."""

    def __init__(self, one: OneRank, other: OneRank, counted: Callable[[], bool]) -> None:
        self.nets = {"one": one, "other": other}
        both = [*one.model.parameters(), *other.model.parameters()]
        self.joint = torch.optim.SGD(both, lr=RATE)
        self.average = AveragedModel(one.model, multi_avg_fn=get_ema_multi_avg_fn(0.75))
        self.in_hook = AveragedModel(one.model, multi_avg_fn=get_ema_multi_avg_fn(0.75))
        self.pending: Tensor | None = None
        self.pending_factors: dict[str, Tensor] = {}
        self.seen_in_hooks: list[bool] = []
        for optimizer in (one.both, self.joint):
            optimizer.register_step_post_hook(lambda *_: self._after_step(counted()))

    def _after_step(self, counted: bool) -> None:
        one = self.nets["one"]
        self.seen_in_hooks.append(shows_shared(one))
        if counted:
            self.in_hook.update_parameters(one.model)


def shows_shared(rank: OneRank) -> bool:
    return same_bits([p.detach() for p in rank.model.parameters()], [*rank.shared().values()])


def shows_own(rank: OneRank) -> bool:
    own = rank.pipeline.models.own
    return all(p.data_ptr() == own[name].data_ptr() for name, p in rank.model.named_parameters())


class Seen(RuleBasedStateMachine):
    @initialize(
        world=st.sampled_from([2, 2, 3]),
        schemes=st.tuples(*[st.sampled_from(["topk", "exdyna", "topk-union"])] * 2),
        periods=st.tuples(*[st.sampled_from([(1, 1), (1, 1), (2, 1), (3, 2)])] * 2),
    )
    def begin(
        self, world: int, schemes: tuple[str, str], periods: tuple[tuple[int, int], tuple[int, int]]
    ) -> None:
        self.world, self.all_step = world, True
        self.fleets = [
            Fleet(world, scheme, 0.3, 0.5, *period) for scheme, period in zip(schemes, periods, strict=True)
        ]
        one, other = self.fleets
        self.players = [
            Player(one.ranks[rank], other.ranks[rank], lambda: self.all_step) for rank in range(world)
        ]

    def teardown(self) -> None:
        for fleet in vars(self).get("fleets", ()):
            fleet.close()

    def everyone(self, do: Callable[[Player, int], Any]) -> None:
        """A thread a rank; then all is looked at."""
        self.fleets[0].room.everyone(lambda rank: do(self.players[rank], rank))
        self.look()

    def look(self) -> None:
        for fleet in self.fleets:
            for rank in fleet.ranks:
                assert rank.sync.attached.phase in (Phase.RESTING, Phase.FORWARD)
                shows = shows_shared if rank.sync.attached.phase is Phase.RESTING else shows_own
                assert shows(rank), (
                    f"rank {rank.rank} shows another model than it should, {rank.sync.attached.phase}"
                )
            fleet.check([rank.rank for rank in fleet.ranks if rank.sync.attached.phase is Phase.RESTING])
        for name in ("average", "in_hook"):
            first, *others = ([p.detach() for p in getattr(each, name).parameters()] for each in self.players)
            assert all(same_bits(first, each) for each in others), f"ranks' moving averages differ: {name}"
        assert all(all(each.seen_in_hooks) for each in self.players), "a hook after a step saw another model"

    # -- a step of one network ----------------------------------------------------------------------------

    @rule(data=st.data(), seed=seeds, which=st.sampled_from(["one", "other"]))
    def train(self, data: st.DataObject, seed: int, which: str) -> None:
        may = st.sampled_from([False, False, True])
        skips = [data.draw(may, label=f"rank {rank} skips") for rank in range(self.world)]
        self.all_step = not any(skips)
        self.everyone(lambda player, rank: self._step(player, rank, which, seed, skips[rank]))

    def _step(self, player: Player, rank: int, which: str, seed: int, skips: bool) -> None:
        net, factors = player.nets[which], numbers(seed + rank)
        net.both.zero_grad()
        loss, seen = net.ddp(factors), []
        loss.register_hook(lambda _: seen.append(shows_own(net)))
        loss.backward()
        assert seen == [True], "a backward found other values than its forward"
        assert shows_shared(net) or net.sync.attached.phase is Phase.FORWARD, "after a backward"
        if not skips:
            net.both.step()
            self._note(net.both, net, factors)

    def _note(self, optimizer: Any, net: OneRank, factors: dict[str, Tensor]) -> None:
        fleet = next(fleet for fleet in self.fleets if net in fleet.ranks)
        fleet.note_step(optimizer, net, factors)

    @rule(seed=seeds, skips=st.booleans())
    def train_both_by_one_optimizer(self, seed: int, skips: bool) -> None:
        def do(player: Player, rank: int) -> None:
            one, other = player.nets.values()
            player.joint.zero_grad()
            parts = numbers(seed + rank), numbers(seed + 50 + rank)
            (one.ddp(parts[0]) + other.ddp(parts[1])).backward()
            if skips and rank == 0:
                return
            player.joint.step()
            for net, factors in zip((one, other), parts, strict=True):
                self._note(player.joint, net, factors)

        self.all_step = not skips
        self.everyone(do)

    @rule(seed=seeds, which=st.sampled_from(["one", "other"]))
    def train_one_through_the_other(self, seed: int, which: str) -> None:
        """As a generator through its discriminator: both get gradients, one steps."""

        def do(player: Player, rank: int) -> None:
            net = player.nets[which]
            through = player.nets["other" if which == "one" else "one"]
            player.joint.zero_grad()
            factors = numbers(seed + rank)
            (net.ddp(factors) + through.ddp(numbers(seed + 9 + rank))).backward()
            at_rest = through.sync.attached.phase is Phase.RESTING
            assert shows_shared(through) or not at_rest, "the other network, after a backward through it"
            net.both.step()
            self._note(net.both, net, factors)

        self.all_step = True
        self.everyone(do)

    @rule(seed=seeds)
    def train_the_other_while_a_graph_waits(self, seed: int) -> None:
        def do(player: Player, rank: int) -> None:
            one, other = player.nets.values()
            player.joint.zero_grad()
            factors = numbers(seed + rank)
            loss = one.ddp(factors)
            assert shows_own(one), "while its graph waits"
            before = one.own()
            other.ddp(numbers(seed + 3 + rank)).backward()
            other.both.step()
            self._note(other.both, other, numbers(seed + 3 + rank))
            assert same_bits([*one.own().values()], [*before.values()]), "written while a graph waits"
            loss.backward()
            one.both.step()
            self._note(one.both, one, factors)

        self.all_step = True
        self.everyone(do)

    # -- what is no step ------------------------------------------------------------------------------------

    @rule(seed=seeds, which=st.sampled_from(["one", "other"]), alone=st.booleans(), inside=st.booleans())
    def forward_for_somebody_else(self, seed: int, which: str, alone: bool, inside: bool) -> None:
        """In training mode, with gradients, on all ranks or on one: nobody runs it backward."""

        def do(player: Player, rank: int) -> None:
            net = player.nets[which]
            if rank == 0 or not alone:
                (net.model if inside else net.ddp)(numbers(seed)).detach()

        self.everyone(do)

    @rule(seed=seeds, which=st.sampled_from(["one", "other"]))
    def gradient_in_evaluation_mode(self, seed: int, which: str) -> None:
        """Of the shared model, by no DDP: a picture of what matters, say."""

        def do(player: Player, rank: int) -> None:
            net = player.nets[which]
            net.model.eval()
            values = net.model(numbers(seed))
            torch.autograd.grad(values, net.model.parameters())
            net.model.train()

        self.everyone(do)

    @rule(seed=seeds, which=st.sampled_from(["one", "other"]))
    def a_backward_that_breaks_off(self, seed: int, which: str) -> None:
        def do(player: Player, rank: int) -> None:
            loss = player.nets[which].model(numbers(seed))
            loss.register_hook(_raise)
            with contextlib.suppress(ValueError):
                loss.backward()

        self.everyone(do)

    @rule(seed=seeds)
    def a_step_that_raises(self, seed: int) -> None:
        """After it an evaluation, of the shared model."""

        def do(player: Player, rank: int) -> None:
            net, factors = player.nets["one"], numbers(seed + rank)
            net.both.zero_grad()
            net.ddp(factors).backward()
            handle = net.both.register_step_pre_hook(lambda *_: _raise(None))
            with contextlib.suppress(ValueError):
                net.both.step()
            handle.remove()
            net.model.eval()
            net.model(factors).detach()
            net.model.train()

        self.all_step = True
        self.everyone(do)

    @rule()
    def average(self) -> None:
        def do(player: Player, rank: int) -> None:
            with player.nets["one"].sync.shared_model():
                player.average.update_parameters(player.nets["one"].model)

        self.everyone(do)

    @rule(which=st.sampled_from(["one", "other"]))
    def copy(self, which: str) -> None:
        def do(player: Player, rank: int) -> None:
            net = player.nets[which]
            assert same_bits([*net.model.state_dict().values()], [*net.shared().values()])
            copied = [each.detach() for each in copy.deepcopy(net.model).parameters()]
            shown = net.shared() if net.sync.attached.phase is Phase.RESTING else net.own()
            assert same_bits(
                copied, [each.view_as(p) for each, p in zip(shown.values(), copied, strict=True)]
            )

        self.everyone(do)

    @rule(seed=seeds, which=st.sampled_from([0, 1]))
    def write(self, seed: int, which: int) -> None:
        """At rest on all ranks: a rank that writes x by hand has made a step of its own."""
        fleet = self.fleets[which]
        if all(rank.sync.attached.phase is Phase.RESTING for rank in fleet.ranks):
            fleet.write(numbers(seed))
            self.look()

    @rule(
        which=st.sampled_from(["one", "other"]),
        what=st.sampled_from(["flush", "verify"]),
        looked=st.booleans(),
    )
    def call(self, which: str, what: str, looked: bool) -> None:
        """On all ranks; `looked`: after one of them called its model for itself."""

        def do(player: Player, rank: int) -> None:
            net = player.nets[which]
            if looked and rank == 0:
                net.ddp(numbers(rank)).detach()
            getattr(net.sync, what)()

        self.everyone(do)


def _raise(_: Any) -> None:
    raise ValueError("on purpose")


@pytest.mark.timeout(3600)
def test_parameters_show_the_shared_model_whatever_is_done() -> None:
    run_machine(Seen, ENOUGH)
