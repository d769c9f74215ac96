"""Groups that change: what waits on the living is kept, what is lost is told, and the model stays one.

Gradients are whole numbers and the rate a power of two, so that what the optimizers moved is known exactly:

    P w - sum over the living of e == P w at their meeting - what waited then - all that they moved since
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gradsieve import DivergenceError, MismatchError, Steps
from gradsieve.errors import ConfigError
from gradsieve.frameworks.torchft.member import Member
from gradsieve.testing.laws import same_bits
from laws.crew import Small, fake_group, sgd  # noqa: F401  # a fixture
from laws.stepping_ranks import take_seat
from laws.virtual_engine import Room

SCHEMES = ["stripes", "exdyna", "oktopk", "spardl", "topk"]


class One(Member):
    """A replica that draws whole gradients."""

    def __init__(self, number: int, scheme: str = "stripes", **settings: Any) -> None:
        self.number, self.steps = number, 0
        self.model = Small(settings.pop("dtype", torch.float32))
        optimizer = sgd(self.model.parameters())
        settings = {
            "scheme": scheme,
            "density": 0.1,
            "bucket_cap_mb": 2e-4,
            **settings,
        }
        super().__init__(self.model.named_parameters(), optimizer, f"replica {number}", settings)

    def step(self) -> None:
        source = torch.Generator().manual_seed(1009 * self.steps + self.number)
        for parameter in self.model.parameters():
            drawn = torch.randint(-8, 9, parameter.shape, generator=source) / 8
            parameter.grad = drawn.to(parameter.dtype)
        self.steps += 1
        self.optimizers[0].step()

    def vector(self, kind: str) -> Tensor:
        kept = self.pipeline.kept()
        return torch.cat([kept[f"{kind}/{name}"] for name in self.parameters]).double()

    def waiting(self) -> Tensor:
        return self.vector("mark") - self.vector("own")


class Group:
    """Replicas that have met; as a block, its threads end with it."""

    def __init__(self, number: int, members: Sequence[One]) -> None:
        self.members, self.room = list(members), Room(len(members))

        def join(rank: int) -> None:
            take_seat(self.room, rank)
            members[rank].join(number)

        self.room.everyone(join)

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_: object) -> None:
        self.room.close()

    def everyone(self, call: Callable[[One], Any]) -> list[Any]:
        return self.room.everyone(lambda rank: call(self.members[rank]))

    def train(self, steps: int) -> Group:
        for _ in range(steps):
            self.everyone(lambda one: one.exchange())
            for one in self.members:
                one.commit()
                one.step()
        return self

    def leads_to(self) -> Tensor:
        """The model that all that waits leads to: w - mean e."""
        return self.members[0].vector("shared") - self.mean_waiting()

    def mean_waiting(self) -> Tensor:
        return torch.stack([one.waiting() for one in self.members]).mean(0)

    def share_one_model(self) -> bool:
        first = self.members[0]
        return all(
            same_bits([one.vector("shared")], [first.vector("shared")])
            and one.pipeline.figures() == first.pipeline.figures()
            and one.membership == first.membership
            for one in self.members
        )


def brought_up(newcomer: One, peer: One) -> One:
    """As torchft does: by a copy of the peer's state."""
    assert newcomer.take(copy.deepcopy(peer.state())), "the model is said to be the one it had"
    return newcomer


def close(left: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_death_loses_what_waited_there_and_says_how_much(scheme: str) -> None:
    ones = [One(number, scheme) for number in range(4)]
    with Group(1, ones) as group:
        group.train(4)
        group.everyone(lambda one: one.exchange())
        for one in ones:
            one.commit()
        *living, dead = ones
        lost, shared = dead.waiting(), living[0].vector("shared")
        before = [one.waiting() for one in living]
        assert float(lost.norm()) > 1e-3, "nothing waited"
        for one in living:
            one.step()
        moved = torch.stack([one.waiting() for one in living]).sum(0) - torch.stack(before).sum(0)
    with Group(2, living) as group:
        assert all(same_bits([one.vector("shared")], [shared]) for one in living), "the model moved by itself"
        whole = 3 * shared - torch.stack(before).sum(0) - moved
        close(3 * living[0].vector("shared") - 3 * group.mean_waiting(), whole)
        group.train(3)
        assert group.share_one_model()
        [missing] = living[0].membership.missing.values()
        assert missing.name == "replica 3"
        assert missing.residual == pytest.approx(float(lost.norm()), rel=1e-5)
        assert living[1].membership.figures()["lost_mass"] == missing.residual


def test_what_the_optimizers_move_is_all_that_changes_in_a_smaller_group() -> None:
    """Exactly: no rounding in whole numbers and a world of 2."""
    settings = {"density": 0.25, "exchange": Steps(small=6)}
    ones = [One(number, "topk", **settings) for number in range(4)]
    with Group(1, ones) as group:
        group.train(3)
    with Group(2, ones[:2]) as group:
        for _ in range(4):
            owed = 2 * group.leads_to()
            for one in group.members:
                before = one.waiting()
                one.step()
                owed -= one.waiting() - before
            group.everyone(lambda one: one.exchange())
            for one in group.members:
                one.commit()
            close(2 * group.leads_to(), owed)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_newcomer_leaves_the_model_where_it_was(scheme: str) -> None:
    ones = [One(number, scheme) for number in range(3)]
    with Group(1, ones) as group:
        aim = group.train(4).leads_to()
        waited = [one.waiting() for one in ones]
    newcomer = brought_up(One(3, scheme), ones[0])
    with Group(2, [*ones, newcomer]) as group:
        assert all(same_bits([one.waiting()], [old]) for one, old in zip(ones, waited, strict=True))
        close(group.leads_to(), aim)
        assert newcomer.optimizers[0].state_dict()["state"], "without a peer's momentum"
        group.train(3)
        assert group.share_one_model()


def test_so_it_does_where_its_own_model_is_rounded_to_16_bits() -> None:
    """What a peer sends is in the shared model's type, and residuals are from the rounded model."""
    ones = [One(number, dtype=torch.bfloat16) for number in range(3)]
    with Group(1, ones) as group:
        aim = group.train(4).leads_to()
    newcomer = brought_up(One(3, dtype=torch.bfloat16), ones[0])
    with Group(2, [*ones, newcomer]) as group:
        close(group.leads_to(), aim)


def test_one_that_was_late_keeps_what_waits_there() -> None:
    ones = [One(number) for number in range(3)]
    with Group(1, ones) as group:
        group.train(4)
    late = ones[2]
    late.step()
    waits, momentum = late.waiting(), copy.deepcopy(late.optimizers[0].state_dict())
    with Group(2, ones[:2]) as group:
        group.train(2)
        assert ones[0].membership.figures()["replicas_missing"] == 1
    brought_up(late, ones[0])
    with Group(3, ones) as group:
        close(late.waiting(), waits)
        mine = late.optimizers[0].state_dict()["state"][0]["momentum_buffer"]
        assert same_bits([mine], [momentum["state"][0]["momentum_buffer"]])
        group.train(2)
        assert group.share_one_model()
        figures = ones[1].membership.figures()
        assert (figures["replicas_missing"], figures["replicas_returned"], figures["lost_mass"]) == (0, 1, 0)


@pytest.mark.parametrize("committed_by", [0, 1, 2])
def test_an_exchange_that_only_some_committed_is_counted_once(committed_by: int) -> None:
    """Prepared by all, then a death: some commit, the others find out when they meet again."""
    ones = [One(number) for number in range(3)]
    with Group(1, ones) as group:
        group.train(3)
        aim = group.leads_to()
        group.everyone(lambda one: one.exchange())
        for number, one in enumerate(ones):
            if number < committed_by:
                one.commit()
            else:
                assert one.sync is not None
                assert one.sync.runner.pending is None, "an optimizer's step would apply it"
    for one in ones[committed_by:] if committed_by else ():
        assert not one.take(copy.deepcopy(ones[0].state())), "its gradient would be thrown away"
    with Group(2, ones) as group:
        close(group.leads_to(), aim)
        assert group.share_one_model()
        assert ones[0].pipeline.step == (4 if committed_by else 3)
        group.train(2)
        assert group.share_one_model()


def test_one_that_went_on_by_itself_is_told_so() -> None:
    ones = [One(number) for number in range(3)]
    with Group(1, ones) as group:
        group.train(3)
        group.everyone(lambda one: one.exchange())
        ones[2].commit()
    with Group(2, ones[:2]) as group:
        group.train(2)
    with pytest.raises(DivergenceError, match="replica 2: its last exchange"):
        brought_up(ones[2], ones[0])


def test_replicas_of_another_model_are_refused() -> None:
    one, other = One(0), One(1)
    state = one.state()
    state["shared"].pop("bias")
    with pytest.raises(MismatchError, match="another model; this one's bias"):
        other.take(state)


def test_gradients_cannot_change_their_group() -> None:
    with pytest.raises(ConfigError, match="only what exchanges steps"):
        Group(1, [One(number, "exdyna-paper") for number in range(2)])


def loaded(number: int, folder: Path, scheme: str = "stripes") -> One:
    one = One(number, scheme)
    one.checkpoint = folder
    return one


def save(group: Group, folder: Path) -> None:
    def write(one: One) -> None:
        assert one.sync is not None
        one.sync.save(folder)

    group.everyone(write)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_replicas_that_all_start_again_go_on_bit_for_bit(scheme: str, tmp_path: Path) -> None:
    with Group(1, [One(number, scheme) for number in range(3)]) as group:
        save(group.train(4), tmp_path)
        waited = [float(one.waiting().norm()) for one in group.members]
        group.train(3)
        whole = [one.pipeline.kept() for one in group.members]
    with Group(1, [loaded(number, tmp_path, scheme) for number in range(3)]) as again:
        assert again.everyone(lambda one: one.load_if_all_begin()) == [True] * 3
        assert again.share_one_model()
        told = [record.residual for record in again.members[0].membership.present.values()]
        assert told == pytest.approx(waited, rel=1e-5)
        for one in again.members:
            one.steps = 4
        again.train(3)
        for one, before in zip(again.members, whole, strict=True):
            now = one.pipeline.kept()
            assert same_bits([now[key] for key in before], list(before.values()))


def test_fewer_that_start_again_share_all_that_waited_and_others_join_them(tmp_path: Path) -> None:
    with Group(1, [One(number) for number in range(3)]) as group:
        save(group.train(4), tmp_path)
        aim = group.leads_to()
    two = [loaded(number, tmp_path) for number in range(2)]
    with Group(1, two) as group:
        group.everyone(lambda one: one.load_if_all_begin())
        close(group.leads_to(), aim)
    third = brought_up(loaded(2, tmp_path), two[0])
    with Group(2, [*two, third]) as group:
        assert group.everyone(lambda one: one.load_if_all_begin()) == [False] * 3
        close(group.leads_to(), aim)
        assert group.train(2).share_one_model()


def test_an_exchange_after_a_checkpoint_that_nobody_committed_is_not_counted(tmp_path: Path) -> None:
    """Its number is not the one of the checkpoint's last."""
    with Group(1, [One(number) for number in range(2)]) as group:
        save(group.train(3), tmp_path)
    ones = [loaded(number, tmp_path) for number in range(2)]
    with Group(1, ones) as group:
        group.everyone(lambda one: one.load_if_all_begin())
        shared = ones[0].vector("shared")
        group.everyone(lambda one: one.exchange())
        assert not ones[1].take(copy.deepcopy(ones[0].state()))
    with Group(2, ones):
        assert all(same_bits([one.vector("shared")], [shared]) for one in ones)


def test_a_replica_that_is_started_again_alone_takes_the_others_state(tmp_path: Path) -> None:
    ones = [One(number) for number in range(3)]
    with Group(1, ones) as group:
        save(group.train(4), tmp_path)
        group.train(2)
        aim = group.leads_to()
    back = brought_up(loaded(3, tmp_path), ones[0])
    with Group(2, [*ones, back]) as group:
        assert group.everyone(lambda one: one.load_if_all_begin()) == [False] * 4
        assert {one.pipeline.step for one in group.members} == {6}
        close(group.leads_to(), aim)


def test_a_checkpoint_on_some_replicas_only_is_refused(tmp_path: Path) -> None:
    with Group(1, [One(number) for number in range(2)]) as group:
        save(group.train(2), tmp_path)
    with pytest.raises(MismatchError, match="replica 1 is to begin again"):
        Group(1, [loaded(0, tmp_path), One(1)])
