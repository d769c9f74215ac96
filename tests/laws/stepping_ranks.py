"""P virtual ranks with real DDP models, real optimizers and real syncs, told what to do in any order.

Gradients are whole numbers and rates powers of two, so that what the optimizers moved is known exactly. The
law that is held at all times:

    P w - sum over ranks of e == P w at first - all that the optimizers of all ranks moved
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Iterator
from concurrent.futures import wait
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradsieve
from gradsieve import runner, step_length
from gradsieve import sync as sync_module
from gradsieve.parallel.ddp import DdpSync
from gradsieve.pipeline import StepPipeline
from gradsieve.testing.laws import same_bits
from laws.virtual_engine import Room, VirtualEngine
from previews import fix_preview

RATE = 2.0**-4
SHAPES = {"first": (4, 9), "bias": (5,), "last": (3, 13)}
ONE, OTHER = ("first",), ("bias", "last")
"""Parameters of the two optimizers."""


_here = threading.local()
"""What belongs to the rank whose thread this is."""


def interruptible_wait(*futures: Any, **settings: Any) -> Any:
    """In the place of `concurrent.futures.wait`: interrupted, once, in the thread that asked for it."""
    if getattr(_here, "is_pressed", False):
        _here.is_pressed = False
        raise KeyboardInterrupt
    return wait(*futures, **settings)


def take_seat(room: Room, rank: int) -> None:
    """The sync that is made next in this thread is that rank's."""
    _here.engine = VirtualEngine(room, rank)


def _engine_here(_: Any) -> VirtualEngine:
    return _here.engine


def _place_here(_: Any) -> tuple[int, int]:
    return _here.engine.rank, _here.engine.world


@contextlib.contextmanager
def virtual() -> Iterator[None]:
    """Within it syncs run on virtual engines, can be interrupted and keep quiet, and own noise is
    looked for in their small tensors, too."""
    with (
        mock.patch.object(step_length, "FEWEST", 1),
        mock.patch.object(sync_module, "Engine", _engine_here),
        mock.patch.object(sync_module, "place_in", _place_here),
        mock.patch.object(runner, "wait", interruptible_wait),
        mock.patch.object(sync_module, "startup"),
        mock.patch.object(sync_module, "_warn_at_exit"),
    ):
        yield


class Model(nn.Module):
    """Its gradient is what it is given, and its value shows every parameter."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        source = torch.Generator().manual_seed(5)
        for name, shape in SHAPES.items():
            start = torch.randint(-8, 9, shape, generator=source) / 8
            self.register_parameter(name, nn.Parameter(start.to(dtype)))

    def forward(self, factors: dict[str, Tensor]) -> Tensor:
        parts = [(parameter * factors[name]).sum() for name, parameter in self.named_parameters()]
        return torch.stack(parts).sum()


class OneRank:
    def __init__(
        self,
        room: Room,
        rank: int,
        scheme: str,
        density: float,
        preview: float | None,
        every: int,
        late: int,
    ) -> None:
        self.rank, self.room = rank, room
        self.model = Model(torch.float32)
        self.ddp = DistributedDataParallel(self.model)
        parameters = dict(self.model.named_parameters())
        self.both = torch.optim.SGD(parameters.values(), lr=RATE)
        self.one = torch.optim.SGD([parameters[name] for name in ONE], lr=RATE)
        self.other = torch.optim.SGD([parameters[name] for name in OTHER], lr=RATE)
        self.settings = {"scheme": scheme, "density": density}
        self.exchange = gradsieve.Steps(small=6, every=every, overlap=late)
        self.preview = preview
        self.sync = self.attach()

    def attach(self) -> DdpSync:
        take_seat(self.room, self.rank)
        sync = gradsieve.attach(self.ddp, self.both, exchange=self.exchange, **self.settings)
        fix_preview(sync.pipeline, self.preview)
        return sync

    @property
    def pipeline(self) -> StepPipeline:
        assert isinstance(self.sync.pipeline, StepPipeline)
        return self.sync.pipeline

    def own(self) -> dict[str, Tensor]:
        return {name: part.clone() for name, part in self.pipeline.models.own.items()}

    def shared(self) -> dict[str, Tensor]:
        shown = self.pipeline.models.shown()
        return {name: shown[name].clone().view(shape) for name, shape in SHAPES.items()}

    def waiting(self) -> dict[str, Tensor]:
        out = {}
        for unit, vector in zip(self.pipeline.units, self.pipeline.residuals(), strict=True):
            out |= {slot.name: vector[slot.start : slot.stop].double() for slot in unit.slots}
        return out


class Fleet:
    """The ranks, and what is owed to the law."""

    def __init__(
        self, world: int, scheme: str, density: float, preview: float | None, every: int = 1, late: int = 1
    ) -> None:
        self.room, self._lock = Room(world), threading.Lock()
        self.world, self.exact = world, world in (1, 2, 4) and preview is not None
        self.ranks: list[OneRank] = self.room.everyone(
            lambda rank: OneRank(self.room, rank, scheme, density, preview, every, late)
        )
        self.owed = {name: world * part.double().flatten() for name, part in self.ranks[0].shared().items()}
        self.saved: tuple[list[dict[str, Tensor]], dict[str, Tensor]] | None = None

    def close(self) -> None:
        for rank in self.ranks:
            rank.sync.close()
        self.room.close()

    # -- what a rank may do -----------------------------------------------------------------------------

    def step(self, rank: OneRank, how: str, factors: dict[str, Tensor]) -> None:
        """By which optimizers, and with what in `.grad`."""
        optimizers = {
            "both": [rank.both],
            "in turn": [rank.one, rank.other],
            "the other way round": [rank.other, rank.one],
            "one": [rank.one],
            "closure": [rank.both],
            "late": [torch.optim.SGD(rank.model.parameters(), lr=RATE)],
            "interrupted": [rank.both],
            "not finite": [rank.both],
            "skipped": [],
        }[how]
        if how == "not finite":
            rank.model.last.grad[1, 2] = torch.inf
        for optimizer in optimizers:
            untouched = self._others(rank, optimizer)
            if how == "interrupted" and self._waits(rank):
                self._interrupt(optimizer)
            optimizer.step()
            assert same_bits([*self._others(rank, optimizer).values()], [*untouched.values()]), (
                "parameters were written that this optimizer does not have"
            )
            if how != "not finite":
                self.note_step(optimizer, rank, factors)

    def _waits(self, rank: OneRank) -> bool:
        """Whether its optimizer's step will wait for what an exchange gave."""
        if rank.sync.runner.pending is not None:
            return rank.pipeline.is_exchange_due
        return rank.pipeline.models.is_due(rank.sync.pipeline.parameters.keys())

    @contextlib.contextmanager
    def interrupted(self) -> Iterator[None]:
        """Ctrl-C at the first wait within it, if there is one; the user goes on."""
        _here.is_pressed = True
        try:
            with contextlib.suppress(KeyboardInterrupt):
                yield
        finally:
            _here.is_pressed = False

    def _interrupt(self, optimizer: torch.optim.Optimizer) -> None:
        """Ctrl-C while the rank waits for what the exchange gave; the user calls step() again."""
        _here.is_pressed = True
        with contextlib.suppress(KeyboardInterrupt):
            optimizer.step()
            raise AssertionError("Ctrl-C was not noticed")

    def _others(self, rank: OneRank, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        its = {id(p) for group in optimizer.param_groups for p in group["params"]}
        names = [name for name, p in rank.model.named_parameters() if id(p) not in its]
        return {name: rank.pipeline.models.own[name].clone() for name in names}

    def note_step(self, optimizer: torch.optim.Optimizer, rank: OneRank, factors: dict[str, Tensor]) -> None:
        its = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for name, parameter in rank.model.named_parameters():
            if id(parameter) in its:
                self._moved(name, factors[name])

    def evaluate(self, rank: OneRank, inside: bool, gradients: bool) -> Tensor:
        """The model's value, which has to be that of the shared model; its own model stays as it is. With
        gradients only inside of DDP: outside, its next backward is taken for the one that belongs to it."""
        ones = {name: torch.ones(shape) for name, shape in SHAPES.items()}
        own, shown = rank.own(), [p.data_ptr() for p in rank.model.parameters()]
        rank.ddp.eval()
        with contextlib.nullcontext() if gradients and inside else torch.no_grad():
            value = (rank.model if inside else rank.ddp)(ones).detach()
        rank.ddp.train()
        wanted = torch.stack([part.sum() for part in rank.shared().values()]).sum()
        assert torch.equal(value, wanted), "what was evaluated is not the shared model"
        assert same_bits([*rank.own().values()], [*own.values()]), "evaluating changed the rank's own model"
        assert [p.data_ptr() for p in rank.model.parameters()] == shown, (
            "evaluating left another model behind"
        )
        return value

    def save_model(self, rank: OneRank, at_rest: bool) -> None:
        saved = [*rank.model.state_dict().values()]
        shared = [*rank.shared().values()]
        assert same_bits(saved, shared), "state_dict() is not the shared model"
        if at_rest:
            copied = copy.deepcopy(rank.model)
            assert same_bits([p.detach() for p in copied.parameters()], shared), (
                "a copy is not the shared model"
            )

    def _moved(self, name: str, gradient: Tensor) -> None:
        with self._lock:
            self.owed[name] -= RATE * gradient.double().flatten()

    # -- what all ranks do ------------------------------------------------------------------------------

    def flush(self) -> None:
        self.room.everyone(lambda rank: self.ranks[rank].sync.flush())
        for rank in self.ranks:
            assert not any(bool(part.any()) for part in rank.waiting().values()), (
                "something waits after a flush"
            )
            assert same_bits([*rank.own().values()], [*self.ranks[0].own().values()]), (
                "a flush left two models"
            )

    def save(self) -> None:
        self.saved = [rank.sync.state_dict() for rank in self.ranks], copy.deepcopy(self.owed)

    def load(self) -> None:
        if self.saved is not None:
            states, owed = self.saved
            self.room.everyone(lambda rank: self.ranks[rank].sync.load_state_dict(states[rank]))
            self.owed = copy.deepcopy(owed)

    def load_model(self, numbers: dict[str, Tensor]) -> None:
        """Of one that is the shared model already nobody takes notice: what waits goes on waiting."""
        for rank in self.ranks:
            rank.sync.runner.complete()
        shared = self.ranks[0].shared()
        same = all(torch.equal(shared[name], part / 4) for name, part in numbers.items())
        for rank in self.ranks:
            rank.model.load_state_dict({name: part / 4 for name, part in numbers.items()})
        if not same:
            self.owed = {name: self.world * part.double().flatten() / 4 for name, part in numbers.items()}

    def load_the_same_model(self) -> None:
        for rank in self.ranks:
            rank.model.load_state_dict(copy.deepcopy(rank.model.state_dict()))

    def write(self, numbers: dict[str, Tensor]) -> None:
        """The user changes parameters between two steps, alike on all ranks."""
        with torch.no_grad():
            for rank in self.ranks:
                for name, parameter in rank.model.named_parameters():
                    parameter += numbers[name] / 4
        for name in self.owed:
            self.owed[name] += self.world * numbers[name].double().flatten() / 4

    def attach_anew(self) -> None:
        """What waited at close() is gone, and said to be."""
        for rank in self.ranks:
            rank.sync.close()
        shared = self.ranks[0].model.state_dict()
        assert all(same_bits([*r.model.state_dict().values()], [*shared.values()]) for r in self.ranks), (
            "close() left different models"
        )
        made = self.room.everyone(lambda rank: self.ranks[rank].attach())
        for rank, sync in zip(self.ranks, made, strict=True):
            rank.sync = sync
        self.owed = {name: self.world * p.double().flatten() for name, p in shared.items()}
        self.saved = None

    # -- what must hold ---------------------------------------------------------------------------------

    def check(self, taken: Any = ()) -> None:
        shared = self.ranks[0].shared()
        for rank in self.ranks:
            assert same_bits([*rank.shared().values()], [*shared.values()]), "ranks share different models"
        waiting = [rank.waiting() for rank in self.ranks]
        for name, owed in self.owed.items():
            held = self.world * shared[name].double().flatten() - sum(own[name] for own in waiting)
            worst = float((held - owed).abs().max())
            assert worst <= (0.0 if self.exact else 1e-3), f"{name}: steps lost or made up, by {worst:g}"
        for rank in taken:
            shown = [p.detach() for p in self.ranks[rank].model.parameters()]
            assert same_bits(shown, [*shared.values()]), (
                f"rank {rank} shows another model than the shared one"
            )
