"""Whatever is done in whatever order, nothing is lost: a state machine over real syncs on virtual ranks.

`just soak` tries 2,000 sequences of 30 actions.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from torch import Tensor

from gradsieve import kernels
from gradsieve.attached import Phase
from gradsieve.testing.laws import same_bits
from laws.stepping_ranks import SHAPES, Fleet, OneRank, virtual
from laws.virtual_engine import PATIENCE

ENOUGH = int(os.environ.get("ANY_ORDER_EXAMPLES", "40"))

STEPS = [
    "both",
    "in turn",
    "the other way round",
    "one",
    "closure",
    "late",
    "interrupted",
    "not finite",
    "skipped",
]
IN_THE_MIDDLE = ["nothing", "evaluate", "save", "look at all"]


@pytest.fixture(scope="module", autouse=True)
def fake_group() -> Iterator[None]:
    """DDP wants a process group. Nothing travels on it: syncs have their own engine."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    kernels.active()  # loaded here, and not while ranks wait for each other
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    with virtual():
        yield
    dist.destroy_process_group()


def numbers(seed: int) -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(seed)
    return {name: torch.randint(-4, 5, shape, generator=source).float() for name, shape in SHAPES.items()}


seeds = st.integers(0, 10**6)


class Turns:
    """Threads that do one thing each, in this order, and go on when all have done it."""

    def __init__(self, order: list[int]) -> None:
        self._left, self._moved = list(order), threading.Condition()

    def take(self, rank: int, what: Callable[[], Tensor]) -> Tensor:
        with self._moved:
            assert self._moved.wait_for(lambda: not self._left or self._left[0] == rank, PATIENCE)
            try:
                return what()
            finally:
                self._left = [other for other in self._left if other != rank]
                self._moved.notify_all()
                assert self._moved.wait_for(lambda: not self._left, PATIENCE)


class AnyOrder(RuleBasedStateMachine):
    fleet: Fleet

    @initialize(
        world=st.sampled_from([1, 2, 2, 3, 4]),
        scheme=st.sampled_from(["exdyna", "topk", "spardl", "oktopk", "topk-union", "micro", "deft"]),
        density=st.sampled_from([0.1, 0.3, 1.0]),
        preview=st.sampled_from([1.0, 0.5, 0.0, None]),
        every_and_late=st.sampled_from([(1, 1), (1, 1), (2, 1), (2, 2), (3, 2), (3, 3)]),
    )
    def begin(
        self,
        world: int,
        scheme: str,
        density: float,
        preview: float | None,
        every_and_late: tuple[int, int],
    ) -> None:
        self.fleet = Fleet(world, scheme, density, preview, *every_and_late)

    def teardown(self) -> None:
        if "fleet" in vars(self):  # it began
            self.fleet.close()

    @rule(data=st.data(), seed=seeds, micro=st.integers(0, 2))
    def train(self, data: st.DataObject, seed: int, micro: int) -> None:
        """One synchronised backward on every rank, and on each what it likes around it."""
        fleet = self.fleet
        order = data.draw(st.permutations(range(fleet.world)), label="order of ranks")
        how = [data.draw(st.sampled_from(STEPS), label=f"step of rank {rank}") for rank in range(fleet.world)]
        middle = [
            data.draw(st.sampled_from(IN_THE_MIDDLE), label=f"in its middle, {rank}")
            for rank in range(fleet.world)
        ]
        turns = Turns([rank for rank in order if how[rank] != "closure"])

        def do(rank: int) -> None:
            """A thread a rank: where one's forward comes with its step, in a closure, others wait for it."""
            if how[rank] == "closure":
                self._step_by_closure(rank, seed)
                return
            loss = turns.take(rank, lambda: self._forward(rank, seed, micro))
            self._step(rank, how[rank], middle[rank], loss, seed, micro)

        fleet.room.everyone(do)
        fleet.check(taken=[rank for rank in order if how[rank] in ("both", "in turn", "closure", "late")])
        if data.draw(st.booleans(), label="and evaluates"):
            self.check_evaluation(seed)

    def _forward(self, rank: int, seed: int, micro: int) -> Tensor:
        one = self.ranks[rank]
        one.both.zero_grad()
        for part in range(micro):
            with one.ddp.no_sync():
                one.ddp(numbers(seed + 7 * part + rank)).backward()
        return one.ddp(numbers(seed + 100 + rank))

    def _step(self, rank: int, how: str, middle: str, loss: Tensor, seed: int, micro: int) -> None:
        one = self.ranks[rank]
        self._in_the_middle(one, middle, seed)
        own = one.pipeline.models.own
        assert all(p.data_ptr() == own[name].data_ptr() for name, p in one.model.named_parameters()), (
            "a look between forward and backward left another model in place"
        )
        before, at_its_end = one.own(), []
        backward_ended = one.sync.attached.backward_ended

        def ended() -> None:
            at_its_end.append(one.own())
            backward_ended()

        pressed = self.fleet.interrupted() if how == "interrupted" else contextlib.nullcontext()
        with mock.patch.object(one.sync.attached, "backward_ended", ended), pressed:
            loss.backward()
        assert same_bits([*at_its_end[0].values()], [*before.values()]), (
            "parameters were written inside a backward"
        )
        parts = [numbers(seed + 100 + rank), *(numbers(seed + 7 * part + rank) for part in range(micro))]
        self.fleet.step(one, how, {name: sum(part[name] for part in parts) for name in SHAPES})

    def _step_by_closure(self, rank: int, seed: int) -> None:
        one, factors, broken = self.ranks[rank], numbers(seed + 200 + rank), seed % 5 == 0

        def closure() -> Tensor:
            one.both.zero_grad()
            loss = one.ddp(factors) * (float("nan") if broken else 1.0)
            loss.backward()
            return loss

        one.both.step(closure)
        assert all(p.isfinite().all() for p in one.pipeline.models.own.values()), (
            "a NaN reached the parameters"
        )
        if not broken:
            self.fleet.note_step(one.both, one, factors)

    @property
    def ranks(self) -> list[OneRank]:
        return self.fleet.ranks

    def _in_the_middle(self, one: OneRank, what: str, seed: int) -> None:
        fleet = self.fleet
        if what == "evaluate":
            fleet.evaluate(one, inside=bool(seed % 2), gradients=seed % 3 == 0)
        elif what == "save":
            fleet.save_model(one, at_rest=False)
        elif what == "look at all":
            one.sync.metrics()

    @rule(seed=seeds)
    def evaluate(self, seed: int) -> None:
        self.check_evaluation(seed)

    def check_evaluation(self, seed: int) -> None:
        values = [self.fleet.evaluate(r, bool(seed % 2), seed % 3 == 0) for r in self.fleet.ranks]
        assert all(torch.equal(value, values[0]) for value in values), "ranks evaluate different models"

    @rule()
    def copy_models(self) -> None:
        for rank in self.ranks:
            at_rest = rank.sync.attached.phase is Phase.RESTING
            self.fleet.save_model(rank, at_rest)

    @rule()
    def flush(self) -> None:
        self.fleet.flush()
        self.fleet.check()

    @rule()
    def verify(self) -> None:
        fleet = self.fleet
        fleet.room.everyone(lambda rank: fleet.ranks[rank].sync.verify())
        fleet.check()

    @rule()
    def save(self) -> None:
        self.fleet.save()
        self.fleet.check()

    @rule()
    def load(self) -> None:
        self.fleet.load()
        self.fleet.check()

    @rule(seed=seeds)
    def load_model(self, seed: int) -> None:
        self.fleet.load_model(numbers(seed))
        self.fleet.check(taken=range(self.fleet.world))

    @rule()
    def load_the_same_model(self) -> None:
        self.fleet.load_the_same_model()
        self.fleet.check(taken=range(self.fleet.world))

    @rule(seed=seeds)
    def write(self, seed: int) -> None:
        self.fleet.write(numbers(seed))
        for rank in self.fleet.ranks:
            rank.sync.replica.models.show_own()  # as the next forward does
            rank.sync.replica.models.show_shared()
        self.fleet.check()

    @rule()
    def attach_anew(self) -> None:
        self.fleet.attach_anew()
        self.fleet.check(taken=range(self.fleet.world))


def run_machine(machine: type[RuleBasedStateMachine], examples: int, **others: Any) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            derandomize=True,
            database=None,
            **others,
        ),
    )


@pytest.mark.timeout(3600)
def test_nothing_is_lost_in_any_order() -> None:
    run_machine(AnyOrder, ENOUGH)


class Drawn:
    """A training step without anything unusual."""

    def draw(self, strategy: Any, label: str) -> Any:
        if label == "order of ranks":
            return [0, 1]
        return {"step": "both", "in i": "nothing"}.get(label[:4], False)


def test_loading_what_the_model_just_gave_changes_nothing_while_an_exchange_is_pending() -> None:
    machine = AnyOrder()
    machine.fleet = Fleet(2, "exdyna", 0.1, 1.0, 2, 2)
    try:
        for seed in (0, 1):
            machine.train(data=Drawn(), seed=seed, micro=0)
        assert all(rank.sync.runner.pending is not None for rank in machine.fleet.ranks)
        machine.load_the_same_model()
        assert all(rank.sync.runner.pending is not None for rank in machine.fleet.ranks), (
            "it is the same model"
        )
        machine.train(data=Drawn(), seed=3, micro=0)
    finally:
        machine.teardown()
