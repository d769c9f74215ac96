"""A rank's own model, in addition to the one that all ranks share.

    w   the shared model: the same bits on every rank
    x   the model this rank trains: its parameters, which its optimizer steps
    m   the anchor that x is compared with
    e   the residual: m - x, all that this rank's steps moved and it has not sent to the others yet
    c   what e would be if this rank had moved as all ranks did in the mean; only where somebody asks for it

    waiting   e, wherever it is asked for: nothing is accumulated, a step is in x the moment it is made
    apply     where elements were sent: w -= update / P, e -= spent, whatever x is by then; x is only read
    rebase    x = w - a e, and m follows, so that the residual stays the same; a is the preview. It is due
              where something was applied, and in one window of the vector a step
    noise     e - c, what this rank moved and the others did not; after that c = e (`step_length.py`)

An exchange can be applied whenever no optimizer steps. Rebasing writes x, so it waits until an optimizer is
about to write x too, and is done for the parameters of that optimizer alone.

A window comes round every WINDOWS steps, so that x has the last few steps in full and of what is older the
part a. The law: P w - sum over ranks of e is changed by the optimizers alone; neither the exchange, whether
it succeeds or not, nor applying it, nor rebasing changes it.

Memory: 2 n elements, n more with c, and n of their own type for parameters narrower than w. An exchange is
lent as much as it reads at once, which stays: of a stretch in few bits a piece, n where everything is sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradsieve.feedback.units import Slot, Unit, by_slot, parts_of
from gradsieve.kernels import apply, rebase, select, waiting, waiting_above
from gradsieve.kernels.torch_passes import divisor, window
from gradsieve.types import Host, Outcome, Sparse

WINDOWS = 3
"""Windows of the vector, one of which is rebased in each step."""
# Pieces of parameters (name and place in it), and their own noise end to end.
Noise = tuple[list[tuple[str, slice]], Tensor]
_MOST_NOISY = 64
"""Stretches that wait for optimizers which do not step. In older ones noise is found when they come round."""


@dataclass(slots=True)
class Due:
    """What has to be rebased after one exchange, and the parameters in which that was not done yet."""

    window: int | None
    places: list[Sparse]
    names: Set[str]


class LocalSteps:
    def __init__(self, unit: Unit, parameters: Mapping[str, Tensor]) -> None:
        self.unit = unit
        self.shared = _concatenate(unit, unit.sparse, parameters)
        self.anchor = self.shared.clone()
        self.shared_dense = _concatenate(unit, unit.dense, parameters)
        self.anchor_dense = self.shared_dense.clone()
        own = {slot.name: parameters[slot.name] for slot in unit.slots}
        self._narrow = {name: p.clone() for name, p in own.items() if p.dtype != unit.dtype}
        self._all = frozenset(own)
        self._rooms: list[Tensor] = []
        self._due: list[Due] = []
        self._due_whole: Set[str] = frozenset()
        self.common: Tensor | None = None
        """c, of the sparse slots."""
        self._noisy: list[tuple[slice, Set[str]]] = []
        """Where own noise is to be looked at, and the parameters in which that was not done yet."""

    def waiting(self, parameters: Mapping[str, Tensor], exchanged: bool = False) -> Waiting:
        """`exchanged`: for an exchange, of which there is one at a time: it is lent memory that stays."""
        return Waiting(self, parameters, self._rooms if exchanged else [])

    def dense_turn(self, step: int, most: int | None) -> slice:
        """Where the dense slots are exchanged in this step: they need no selection, but go round robin where
        they are more than `most` elements, or they would cost more than all others."""
        length = self.anchor_dense.numel()
        turns = -(-length // max(1, most)) if most is not None and length else 1
        turn = step % turns
        return slice(length * turn // turns, length * (turn + 1) // turns)

    def waiting_dense(self, parameters: Mapping[str, Tensor], here: slice | None = None) -> Tensor:
        """Of the dense slots."""
        here = here or slice(0, self.anchor_dense.numel())
        out = self.anchor_dense.new_empty(here.stop - here.start)
        for place, own in _pieces(self.unit.dense, parameters, here):
            waiting(self.anchor_dense[place], own, out[place.start - here.start : place.stop - here.start])
        return out

    # -- apply ------------------------------------------------------------------------------------------

    def apply(
        self,
        update: Sparse,
        spent: Sparse,
        dense: Outcome[None],
        parameters: Mapping[str, Tensor],
        world: int,
        window: int | None,
    ) -> None:
        """Apply the result of an exchange, and subtract what was sent from the residual."""
        places = [update]
        if update.indices is None:
            self._apply_run(True, update, spent, parameters, world)
        else:
            self._apply_some(update, spent, parameters, world)
            if spent.indices is not update.indices:
                places.append(spent)
        self._apply_run(False, dense.update, dense.spent, parameters, world)
        self._round(update)
        self._due.append(Due(window, places, self._all))
        if len(self._due) > WINDOWS:  # some optimizer does not step: its due rebases must not pile up
            self._due_whole |= self._due.pop(0).names

    def _apply_run(
        self,
        sparse: bool,
        update: Sparse,
        spent: Sparse,
        parameters: Mapping[str, Tensor],
        world: int,
    ) -> None:
        """Where all elements of a run were sent."""
        slots, shared, anchor = self._vectors()[0 if sparse else 1]
        start = update.start
        for total, given in zip(update.pieces(), spent.pieces(), strict=True):
            stop = start + total.numel()
            for slot, here in _overlaps(slots, slice(start, stop)):
                own = parameters[slot.name][here.start - slot.start : here.stop - slot.start]
                inside = slice(here.start - start, here.stop - start)
                apply(shared[here], own, anchor[here], total[inside], given[inside], world)
            if sparse and self.common is not None:
                self.common[start:stop].add_(total, alpha=1 / world).sub_(given)
            start = stop

    def _apply_some(
        self, update: Sparse, spent: Sparse, parameters: Mapping[str, Tensor], world: int
    ) -> None:
        assert update.indices is not None
        assert spent.indices is not None
        own = self.own_at(parameters, spent)
        anchor = self.anchor.index_select(0, spent.indices)
        self.anchor.index_copy_(0, spent.indices, _marked(anchor, own, spent.values))
        # Two roundings, not a fused one: replicas on different processors must keep the same bits.
        shared = self.shared.index_select(0, update.indices) - update.values / divisor(world, update.values)
        self.shared.index_copy_(0, update.indices, shared)

    def _round(self, update: Sparse) -> None:
        """The shared model in the type of narrow parameters, where it changed."""
        if not self._narrow:
            return
        for slot in self.unit.dense:
            if slot.name in self._narrow:
                self._narrow[slot.name].copy_(self.shared_dense[slot.start : slot.stop])
        changed = replace(update, source=self.shared[update.where])
        for slot, where, values in by_slot(self.unit.sparse, changed):
            if slot.name in self._narrow:
                self._narrow[slot.name][where] = values.to(self._narrow[slot.name].dtype)

    # -- rebase -----------------------------------------------------------------------------------------

    def rebase(self, parameters: Mapping[str, Tensor], preview: float, names: Set[str] | None = None) -> None:
        """x = w - a e in these parameters, or in all, wherever that is due."""
        names = self._all if names is None else names & self._all
        whole = self._due_whole & names
        for slot in self.unit.sparse if whole else ():
            if slot.name in whole:
                self._rebase_between(parameters, preview, slot.start, slot.stop, whole)
        self._due_whole -= whole
        for due in self._due:
            self._rebase_due(due, parameters, preview, names & due.names, whole)
        self._due = [due for due in self._due if due.names]

    def is_due(self, names: Set[str]) -> bool:
        """Whether `rebase` has anything to write in these parameters."""
        return any(due & names for due in (self._due_whole, *(each.names for each in self._due)))

    def allow_rebase_all(self) -> None:
        """Due from now on, in all of the vector."""
        self._due_whole |= self.unit.names_of_sparse

    def _rebase_due(
        self,
        due: Due,
        parameters: Mapping[str, Tensor],
        preview: float,
        names: Set[str],
        done: Set[str] = frozenset(),
    ) -> None:
        """In these parameters; in those that are `done`, dense slots only."""
        if not names:
            return
        self._rebase_dense(parameters, preview, names)
        n = self.unit.n
        if due.window is not None:
            start, stop = n * due.window // WINDOWS, n * (due.window + 1) // WINDOWS
            self._rebase_between(parameters, preview, start, stop, names - done)
        for places in due.places:
            if places.indices is None:
                self._rebase_between(parameters, preview, places.start, places.stop, names - done)
            else:
                inside = places if names == self._all else self._inside(places, names)
                self._rebase_at(inside, parameters, preview)
        due.names -= names

    def _rebase_dense(self, parameters: Mapping[str, Tensor], preview: float, names: Set[str]) -> None:
        for slot in self.unit.dense:
            if slot.name in names:
                here = slice(slot.start, slot.stop)
                rebase(self.shared_dense[here], parameters[slot.name], self.anchor_dense[here], preview)

    def _rebase_between(
        self, parameters: Mapping[str, Tensor], preview: float, start: int, stop: int, names: Set[str]
    ) -> None:
        for here, own in self.pieces(parameters, start, stop, names):
            rebase(self.shared[here], own, self.anchor[here], preview)

    def _rebase_at(self, places: Sparse, parameters: Mapping[str, Tensor], preview: float) -> None:
        assert places.indices is not None
        waits = self.waiting(parameters).of(places)
        own = self.shared.index_select(0, places.indices) - preview * waits
        for slot, indices, values in by_slot(self.unit.sparse, replace(places, source=own)):
            assert isinstance(indices, Tensor)
            parameter = parameters[slot.name]
            narrow = values.to(parameter.dtype)
            parameter.index_copy_(0, indices, narrow)
            if narrow.dtype != values.dtype:  # rounding is not a step, so the anchor is rounded too
                values.copy_(narrow)
        self.anchor.index_copy_(0, places.indices, own.add_(waits))

    def _inside(self, places: Sparse, names: Set[str]) -> Sparse:
        """Those in the slots of these parameters."""
        kept = [
            (indices + slot.start, values)
            for slot, indices, values in by_slot(self.unit.sparse, places)
            if slot.name in names and isinstance(indices, Tensor)
        ]
        indices, values = zip(*kept, strict=True) if kept else ((), ())
        none = places.values.new_empty(0)
        return Sparse(torch.cat([none.long(), *indices]), torch.cat([none, *values]), places.numel)

    # -- own noise --------------------------------------------------------------------------------------

    def follow_others(self) -> None:
        """From now on; nothing was moved yet."""
        self.common = torch.zeros_like(self.anchor)

    def look_for_noise(self, here: slice) -> None:
        """There, in each parameter before its next step."""
        if self.common is not None:
            self._noisy = [*self._noisy[1 - _MOST_NOISY :], (here, self._all)]

    def noise(self, parameters: Mapping[str, Tensor], names: Set[str], most: int) -> Iterator[Noise]:
        """e - c where it is to be looked at in these parameters, so many elements at a time at most."""
        left: list[tuple[slice, Set[str]]] = []
        for run, waiting_for in self._noisy:
            for together in self._together(run, names & waiting_for, most):
                yield self._noise_in(together, parameters)
            if waiting_for - names:
                left.append((run, waiting_for - names))
        self._noisy = left

    def _together(self, run: slice, names: Set[str], most: int) -> Iterator[list[tuple[Slot, slice]]]:
        """Pieces of these parameters, one after the other in the vector."""
        found: list[tuple[Slot, slice]] = []
        for slot, both in _overlaps(self.unit.sparse, run) if names else ():
            for start in range(both.start, both.stop, most) if slot.name in names else ():
                here = slice(start, min(start + most, both.stop))
                if found and (found[-1][1].stop < start or here.stop - found[0][1].start > most):
                    yield found
                    found = []
                found.append((slot, here))
        if found:
            yield found

    def _noise_in(self, together: list[tuple[Slot, slice]], parameters: Mapping[str, Tensor]) -> Noise:
        assert self.common is not None
        start, stop = together[0][1].start, together[-1][1].stop
        now, before = torch.empty_like(self.anchor[start:stop]), self.common[start:stop]
        pieces: list[tuple[str, slice]] = []
        for slot, here in together:
            inside = slice(here.start - slot.start, here.stop - slot.start)
            waiting(
                self.anchor[here], parameters[slot.name][inside], now[here.start - start : here.stop - start]
            )
            pieces.append((slot.name, inside))
        noise = now - before
        before.copy_(now)
        return pieces, noise

    def agree_with_others(self, parameters: Mapping[str, Tensor]) -> None:
        """There is no noise to be found in what was moved until now."""
        if self.common is not None:
            self.common.copy_(self.waiting(parameters).between(0, self.unit.n))
            self._noisy = []

    # -- from outside -----------------------------------------------------------------------------------

    def adopt(self, parameters: Mapping[str, Tensor], names: Set[str]) -> None:
        """The shared model was replaced in these parameters, alike on all ranks: x is w, and the residual is
        empty there."""
        for slots, shared, anchor in self._vectors():
            for slot in slots:
                if slot.name in names:
                    here = slice(slot.start, slot.stop)
                    anchor[here] = parameters[slot.name].copy_(shared[here])
                    if slot.sparse and self.common is not None:
                        self.common[here] = 0.0
        for due in self._due:
            due.names -= names
        self._due_whole -= names

    def write_shared(self, name: str, values: Tensor) -> None:
        """The user wrote to the shared model: the residual stays, and x follows at the next rebase."""
        if name not in self._all:
            return
        if name in self._narrow:
            self._narrow[name].copy_(values)
            self._take_from_narrow(name)
        else:
            self.by_kind()["shared"][name].copy_(values)
        self._allow_rebase(name)

    def notice_writing(self) -> None:
        """What the user wrote where parameters are shown from memory of their own: found by value, since not
        every way of writing raises a version counter."""
        for name in self._narrow:
            if self._take_from_narrow(name):
                self._allow_rebase(name)

    def _take_from_narrow(self, name: str) -> bool:
        """What is shown and is not the shared model rounded was written; the rest keeps its precision."""
        narrow, shared = self._narrow[name], self.by_kind()["shared"][name]
        written = narrow != shared.to(narrow.dtype)
        if not bool(written.any()):
            return False
        torch.where(written, narrow.to(shared.dtype), shared, out=shared)
        return True

    def _allow_rebase(self, name: str) -> None:
        if name in self.unit.names_of_sparse:
            self._due_whole |= {name}
        else:
            self._due.append(Due(0, [], frozenset({name})))

    def shown(self) -> dict[str, Tensor]:
        """The shared model, flat, by parameter, in the parameter's own type."""
        return self.by_kind()["shared"] | self._narrow

    def show_in(self, name: str, memory: Tensor) -> None:
        """From now on this parameter is shown from there."""
        if name in self._all:
            self._narrow[name] = memory.copy_(self.shown()[name])

    def renew(self) -> None:
        """After the shared model, the anchor and the own model were loaded."""
        self._due, self._due_whole, self._noisy = [], frozenset(), []
        shared = self.by_kind()["shared"]
        for name, narrow in self._narrow.items():
            narrow.copy_(shared[name])

    def own_at(self, parameters: Mapping[str, Tensor], part: Sparse) -> Tensor:
        """x where `part` has elements."""
        own = self.anchor.new_empty(part.count)
        for slot, places, values in by_slot(self.unit.sparse, replace(part, source=own)):
            assert isinstance(places, Tensor)
            parameter = parameters[slot.name]
            if parameter.dtype == values.dtype:
                torch.index_select(parameter, 0, places, out=values)
            else:
                values.copy_(parameter.index_select(0, places))
        return own

    def pieces(
        self, parameters: Mapping[str, Tensor], start: int, stop: int, names: Set[str] | None = None
    ) -> Iterator[tuple[slice, Tensor]]:
        """The vector from `start` to `stop` and this rank's model there, slot by slot."""
        slots = self.unit.sparse
        if names is not None:
            slots = tuple(slot for slot in slots if slot.name in names)
        return _pieces(slots, parameters, slice(start, stop))

    def by_kind(self) -> dict[str, dict[str, Tensor]]:
        shared = parts_of(self.shared, self.unit.sparse) | parts_of(self.shared_dense, self.unit.dense)
        anchor = parts_of(self.anchor, self.unit.sparse) | parts_of(self.anchor_dense, self.unit.dense)
        return {"shared": shared, "mark": anchor}  # the names that checkpoints have had from the first

    def _vectors(self) -> tuple[tuple[tuple[Slot, ...], Tensor, Tensor], ...]:
        return (
            (self.unit.sparse, self.shared, self.anchor),
            (self.unit.dense, self.shared_dense, self.anchor_dense),
        )


@dataclass(frozen=True, slots=True)
class Waiting:
    """e of one unit, a `Vector`: computed where it is read."""

    local: LocalSteps
    parameters: Mapping[str, Tensor]
    buffers: list[Tensor]
    """The one that `between` computes into, once there is one."""

    @property
    def device(self) -> torch.device:
        return self.local.anchor.device

    @property
    def dtype(self) -> torch.dtype:
        return self.local.anchor.dtype

    def numel(self) -> int:
        return self.local.anchor.numel()

    def between(self, start: int, stop: int) -> Tensor:
        out = self._room(stop - start)
        for here, own in self.local.pieces(self.parameters, start, stop):
            waiting(self.local.anchor[here], own, out[here.start - start : here.stop - start])
        return out

    def _room(self, count: int) -> Tensor:
        """New memory costs more than what is written to it: as long as it suffices, the same again."""
        if not self.buffers or self.buffers[0].numel() < count:
            self.buffers[:] = [self.local.anchor.new_empty(count)]
        return self.buffers[0][:count]

    def select(
        self, start: int, stop: int, threshold: float, capacity: int, phase: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        if self.device.type != "cpu":
            return select(self.between(start, stop), threshold, capacity, phase)
        found, there = [self.local.anchor.new_empty(0, dtype=torch.long)], [self.local.anchor.new_empty(0)]
        for here, own in self.local.pieces(self.parameters, start, stop):
            indices, values = waiting_above(self.local.anchor[here], own, threshold)
            found.append(indices.add_(here.start - start))
            there.append(values)
        return window(torch.cat(found), torch.cat(there), stop - start, threshold, capacity, phase)

    def at(self, host: Host, indices: Tensor) -> Tensor:
        anchor = self.local.anchor.index_select(0, indices)
        own = self.local.own_at(self.parameters, Sparse(indices, anchor, self.numel(), host))
        waiting(anchor, own, own)
        return own

    def of(self, part: Sparse) -> Tensor:
        """Where `part` has elements."""
        assert part.indices is not None
        return self.at(part.on_host(), part.indices)


def _concatenate(unit: Unit, slots: tuple[Slot, ...], parameters: Mapping[str, Tensor]) -> Tensor:
    parts = [parameters[slot.name].to(unit.dtype) for slot in slots]
    return torch.cat(parts) if parts else torch.empty(0, dtype=unit.dtype, device=unit.device)


def _pieces(
    slots: tuple[Slot, ...], parameters: Mapping[str, Tensor], here: slice
) -> Iterator[tuple[slice, Tensor]]:
    for slot, both in _overlaps(slots, here):
        yield both, parameters[slot.name][both.start - slot.start : both.stop - slot.start]


def _overlaps(slots: tuple[Slot, ...], here: slice) -> Iterator[tuple[Slot, slice]]:
    for slot in slots:
        first, last = max(here.start, slot.start), min(here.stop, slot.stop)
        if first < last:
            yield slot, slice(first, last)


def _marked(anchor: Tensor, own: Tensor, spent: Tensor) -> Tensor:
    """The anchor that makes the residual smaller by what was spent. It is exactly x where nothing is left, so
    that a model of which all was sent is the shared one to the last bit. What is not finite is dropped."""
    left = (anchor - own) - spent
    return own + torch.where(left.isfinite(), left, 0.0)
