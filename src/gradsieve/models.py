"""The models of one rank, if steps are exchanged; and which of them the user's parameters show.

    w   the shared model: the same bits on every rank
    x   the model this rank trains, which its optimizer steps
    m   the reference that x is compared with
    e   the residual: m - x, all that this rank's steps moved and it has not sent to the others yet
    c   what e would be if this rank had moved as all ranks did in the mean; only where it is tracked

    residual  e, computed where it is read: nothing is accumulated, a step is in x the moment it is made
    apply     where elements were sent: w -= update / P, e -= spent, whatever x is by then; x is only read
    rebase    x = w - a e, and m follows, so that the residual stays the same; a is the preview. It is due
              where something was applied, and in one window of the vector a step
    noise     e - c, what this rank moved and the others did not; after that c = e (`step_length.py`)

An exchange can be applied whenever no optimizer steps. Rebasing writes x, so it waits until an optimizer is
about to write x too, and is done for the parameters of that optimizer alone. A window comes round every
WINDOWS steps, so that x has the last few steps in full and of what is older the part a. The law: P w - sum
over ranks of e is changed by the optimizers alone; neither the exchange, whether it succeeds or not, nor
applying it, nor rebasing changes it.

The parameters show x while a training forward of the model, a backward pass or a step of its optimizer is
running, and w at all other times. Changing over moves no element: a parameter's `.data` is pointed to the
other model's memory, where a backward finds what its forward saved. Version counters are raised where a step
ends, as the optimizer's own writing raises them, so that autograd refuses a graph from before; casts that
autocast keeps are dropped. What the user writes to a parameter between steps is written to w. It has to be
the same on all ranks, as in plain DDP; x follows when it is next rebased.

Memory: 2 n elements, n more with c, and n of their own type for parameters narrower than w. An exchange is
lent as much as it reads at once: of a stretch in few bits a piece, n where everything is sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack, to_dlpack

from gradsieve.errors import ConfigError
from gradsieve.kernels import apply, rebase, residual, residual_above, select
from gradsieve.kernels.torch_passes import divisor, window
from gradsieve.torch_names import uses_of, version_of, versions_of
from gradsieve.types import Host, Sparse
from gradsieve.units import Slot, Unit, by_slot, flat_view, parts_of, shaped_like, strides_that_count

WINDOWS = 3  # windows of the vector, one of which is rebased in each step
_MOST_DUE = 3 * WINDOWS  # places to rebase that wait for optimizers which do not step; then it is all of x
# Stretches of noise that wait for them. In older ones noise is found when they come round.
_MOST_NOISY = 64
# Elements in which noise is measured together: on a processor as many as stay in its cache from the first
# pass to the last, on an accelerator more, where what counts is launches.
CHUNK, LARGE_CHUNK = 1 << 16, 1 << 22
# Pieces of parameters (name and place in it), and their own noise end to end.
Noise = tuple[list[tuple[str, slice]], Tensor]


@dataclass(frozen=True, slots=True)
class Due:
    """A place of a unit where something is to be done before the next step of these parameters."""

    where: slice | Sparse
    names: Set[str]


class Models:
    """The models of all units. Without units the parameters hold the only model there is."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        units: Sequence[Unit],
        held: Mapping[str, Tensor] | None = None,
    ) -> None:
        """`held` is what the user writes to, if that is not the parameters themselves: it has the version
        counters."""
        self.units, self.held = tuple(units), held or parameters
        self._parameters = parameters
        self._x = {name: parameter.data for name, parameter in parameters.items()}
        self.own = {name: flat_view(x) for name, x in self._x.items()}  # x, flat, by parameter
        self.shared = [_concatenated(unit, self.own) for unit in self.units]  # w by unit
        self.reference = [w.clone() for w in self.shared]  # m by unit
        self.mean: list[Tensor] = []  # c by unit
        self._names = [frozenset(slot.name for slot in unit.slots) for unit in self.units]
        self._due: list[list[Due]] = [[] for _ in self.units]
        self._noisy: list[list[Due]] = [[] for _ in self.units]
        self._buffers: list[list[Tensor]] = [[] for _ in self.units]
        self._w, self._m = self._by_name(self.shared), self._by_name(self.reference)
        # w in the parameter's own type, where that is narrower; or wherever else it is shown from.
        self._narrow: dict[str, Tensor] = {}
        self._shown: dict[str, Tensor] = {}  # w as parameters show it
        self._uses: dict[str, float] = {}  # how many tensors share that memory while no parameter shows it
        self._showing_shared: dict[str, int] = {}  # parameters that show w, and their version since then
        for name, own in self.own.items():
            if own.dtype == self._w[name].dtype:
                self._show_from(name, self._w[name])
            else:
                self.show_in(name, torch.empty_like(own))

    def _by_name(self, vectors: Sequence[Tensor]) -> dict[str, Tensor]:
        parts = (parts_of(vector, unit.slots) for unit, vector in zip(self.units, vectors, strict=True))
        return {name: part for found in parts for name, part in found.items()}

    def show_in(self, name: str, memory: Tensor) -> None:
        """Show w of this parameter from that memory, flat, which is kept up to date."""
        self._narrow[name] = memory.copy_(self._w[name])
        self._show_from(name, memory)

    def _show_from(self, name: str, memory: Tensor) -> None:
        self._shown[name] = shown = _apart(shaped_like(memory, self._parameters[name]))
        if shown.numel():
            self._uses[name] = uses_of(shown)

    def shown(self) -> dict[str, Tensor]:
        """Return w, flat, by parameter, in the parameter's own type."""
        return self._w | self._narrow

    # -- the residual -----------------------------------------------------------------------------------

    def residual(self, index: int, is_lent: bool = False) -> ResidualView:
        """`is_lent`: for an exchange, of which there is one at a time, in memory that stays."""
        return ResidualView(self, index, self._buffers[index] if is_lent else [])

    def own_at(self, index: int, part: Sparse) -> Tensor:
        """Return x where `part` has elements."""
        found = self.reference[index].new_empty(part.count)
        for slot, places, values in by_slot(self.units[index].slots, replace(part, source=found)):
            assert isinstance(places, Tensor)
            own = self.own[slot.name]
            if own.dtype == values.dtype:
                torch.index_select(own, 0, places, out=values)
            else:
                values.copy_(own.index_select(0, places))
        return found

    def pieces(
        self, index: int, start: int, stop: int, names: Set[str] | None = None
    ) -> Iterator[tuple[slice, Tensor]]:
        """Yield places of a unit's vector from `start` to `stop`, and x there, slot by slot."""
        for slot, here in _overlaps(self.units[index].slots, slice(start, stop)):
            if names is None or slot.name in names:
                yield here, self.own[slot.name][here.start - slot.start : here.stop - slot.start]

    # -- apply ------------------------------------------------------------------------------------------

    def apply(self, index: int, update: Sparse, spent: Sparse, world: int) -> None:
        """Apply the result of an exchange, and take what was sent off the residual."""
        w, m = self.shared[index], self.reference[index]
        if update.indices is not None and spent.indices is not None:
            own, reference = self.own_at(index, spent), m.index_select(0, spent.indices)
            m.index_copy_(0, spent.indices, _moved(reference, own, spent.values))
            # Two roundings, not a fused one: replicas on different processors must keep the same bits.
            shared = w.index_select(0, update.indices) - update.values / divisor(world, update.values)
            w.index_copy_(0, update.indices, shared)
        else:
            start = update.start
            for total, given in zip(update.pieces(), spent.pieces(), strict=True):
                stop = start + total.numel()
                for here, own in self.pieces(index, start, stop):
                    inside = slice(here.start - start, here.stop - start)
                    apply(w[here], own, m[here], total[inside], given[inside], world)
                if self.mean:
                    self.mean[index][start:stop].add_(total, alpha=1 / world).sub_(given)
                start = stop
        if self._narrow:
            changed = replace(update, source=w[update.where])
            for slot, where, values in by_slot(self.units[index].slots, changed):
                if slot.name in self._narrow:
                    self._narrow[slot.name][where] = values.to(self._narrow[slot.name].dtype)

    # -- rebase -----------------------------------------------------------------------------------------

    def make_due(self, index: int, places: Iterable[slice | Sparse]) -> None:
        """Have these places of a unit rebased, in each parameter before its next step."""
        due = self._due[index]
        if len(due) > _MOST_DUE:  # some optimizer does not step: what is due there must not pile up
            names = frozenset[str]().union(*(each.names for each in due))
            due[:] = [Due(slice(0, self.units[index].n), names)]
        for where in places:
            is_run = isinstance(where, Sparse) and where.indices is None
            due.append(Due(slice(where.start, where.stop) if is_run else where, self._names[index]))

    def is_due(self, names: Set[str]) -> bool:
        """Whether `rebase` has anything to write in these parameters."""
        return any(each.names & names for due in self._due for each in due)

    def rebase(self, preview: float, names: Set[str] | None = None) -> None:
        """x = w - a e in these parameters, or in all, wherever that is due."""
        names = self.own.keys() if names is None else names
        for index, due in enumerate(self._due):
            for each in due:
                self._rebase(index, each.where, preview, each.names & names)
            self._due[index] = _without(due, names)

    def _rebase(self, index: int, where: slice | Sparse, preview: float, names: Set[str]) -> None:
        if isinstance(where, slice):
            for here, own in self.pieces(index, where.start, where.stop, names):
                rebase(self.shared[index][here], own, self.reference[index][here], preview)
            return
        for slot, indices, _ in by_slot(self.units[index].slots, where):
            if slot.name in names:
                assert isinstance(indices, Tensor)
                own, reference = self.own[slot.name], self._m[slot.name]
                x, m = own.index_select(0, indices), reference.index_select(0, indices)
                rebase(self._w[slot.name].index_select(0, indices), x, m, preview)
                own.index_copy_(0, indices, x)
                reference.index_copy_(0, indices, m)

    # -- own noise --------------------------------------------------------------------------------------

    def track_mean(self) -> None:
        """Keep c from now on; nothing was moved yet."""
        self.mean = [torch.zeros_like(m) for m in self.reference]

    def set_mean(self, vectors: Sequence[Tensor]) -> None:
        """Take these for c. Without any, what was moved until now counts as moved by all ranks."""
        for index, mean in enumerate(self.mean):
            mean.copy_(vectors[index] if vectors else self.residual(index).between(0, self.units[index].n))
            self._noisy[index] = []

    def look_for_noise(self, index: int, here: slice) -> None:
        """Have noise measured there, in each parameter before its next step."""
        if self.mean:
            self._noisy[index] = [*self._noisy[index][1 - _MOST_NOISY :], Due(here, self._names[index])]

    def noise(self, names: Set[str]) -> Iterator[Noise]:
        """Yield e - c where it is to be measured in these parameters, a few elements at a time."""
        for index, noisy in enumerate(self._noisy):
            for each in noisy:
                assert isinstance(each.where, slice)
                for together in self._together(index, each.where, names & each.names):
                    yield self._noise_in(index, together)
            self._noisy[index] = _without(noisy, names)

    def _together(self, index: int, run: slice, names: Set[str]) -> Iterator[list[tuple[Slot, slice]]]:
        """Yield pieces of these parameters, one after the other in the vector."""
        most = CHUNK if self.reference[index].is_cpu else LARGE_CHUNK
        found: list[tuple[Slot, slice]] = []
        for slot, both in _overlaps(self.units[index].slots, run) if names else ():
            for start in range(both.start, both.stop, most) if slot.name in names else ():
                here = slice(start, min(start + most, both.stop))
                if found and (found[-1][1].stop < start or here.stop - found[0][1].start > most):
                    yield found
                    found = []
                found.append((slot, here))
        if found:
            yield found

    def _noise_in(self, index: int, together: list[tuple[Slot, slice]]) -> Noise:
        start, stop = together[0][1].start, together[-1][1].stop
        now, before = self.residual(index).between(start, stop), self.mean[index][start:stop]
        noise = now - before
        before.copy_(now)
        pieces = [(slot.name, slice(h.start - slot.start, h.stop - slot.start)) for slot, h in together]
        return pieces, noise

    # -- written from outside ---------------------------------------------------------------------------

    def reset_to_shared(self) -> None:
        """Go on from w alone, which was replaced alike on all ranks: x is w, and the residual is empty."""
        for name, own in self.own.items():
            self._m[name].copy_(own.copy_(self._w[name]))
        for mean in self.mean:
            mean.zero_()
        self._due = [[] for _ in self.units]

    def notice_writing(self) -> None:
        """Take over what the user wrote where parameters show w from memory of their own: found by value,
        since not every way of writing raises a version counter."""
        for name in self._narrow:
            if self._take_from_narrow(name):
                self._make_due_in(name)

    def _take_from_narrow(self, name: str) -> bool:
        """Take what is shown and is not w rounded; the rest keeps its precision."""
        narrow, shared = self._narrow[name], self._w[name]
        written = narrow != shared.to(narrow.dtype)
        if not bool(written.any()):
            return False
        torch.where(written, narrow.to(shared.dtype), shared, out=shared)
        return True

    def _make_due_in(self, name: str) -> None:
        for index, unit in enumerate(self.units):
            places = [slice(slot.start, slot.stop) for slot in unit.slots if slot.name == name]
            self._due[index] += [Due(where, frozenset({name})) for where in places]

    def _note_writing(self, name: str) -> None:
        """The user wrote to w: the residual stays, and x follows at the next rebase."""
        parameter = self._parameters[name]
        _check_place(name, parameter, self._shown[name])
        if name in self._narrow:
            self._narrow[name].copy_(flat_view(parameter.detach()))
            self._take_from_narrow(name)
        else:
            self._w[name].copy_(flat_view(parameter.detach()))
        self._make_due_in(name)

    # -- which one parameters show ----------------------------------------------------------------------

    @property
    def may_write_shared(self) -> bool:
        """Whether w can change unseen: no parameter shows it, and no graph or view of the user's reads it."""
        if self._showing_shared:
            return False
        return all(uses_of(self._shown[name]) == uses for name, uses in self._uses.items())

    @property
    def shows_own(self) -> bool:
        """Whether any parameter shows x."""
        return len(self._showing_shared) < len(self._parameters)

    def show_own(self, names: Iterable[str] | None = None) -> Set[str]:
        """Show x in these parameters, or in all; returns those that showed w."""
        showing = self._showing_shared
        changed = list(showing) if names is None else [name for name in names if name in showing]
        if not changed:
            return frozenset()
        versions = versions_of([self.held[name] for name in changed])
        for name, version in zip(changed, versions, strict=True):
            is_replaced = self._parameters[name].data_ptr() != self._shown[name].data_ptr()
            if showing.pop(name) != version or is_replaced:
                self._note_writing(name)
            self.point(name, self._x[name])
        torch.clear_autocast_cache()
        return frozenset(changed)

    def show_shared(self, names: Iterable[str] | None = None, *, raise_version: bool = True) -> None:
        """Show w in these parameters, or in all. `raise_version`: what they showed was written, so that no
        graph from before may be run backward."""
        showing = self._showing_shared
        changed = [name for name in (self._parameters if names is None else names) if name not in showing]
        if not changed:
            return
        held = [self.held[name] for name in changed]
        for name, version in zip(changed, versions_of(held), strict=True):
            parameter, x = self._parameters[name], self._x[name]
            if parameter.data_ptr() != x.data_ptr():  # replaced by the user: a step, like writing in place
                _check_place(name, parameter, x)
                x.copy_(parameter.detach())
            self.point(name, self._shown[name])
            showing[name] = version + raise_version
        torch.clear_autocast_cache()
        if raise_version:
            torch.autograd.graph.increment_version(held)

    def look(self) -> Set[str]:
        """Show w for a moment; what this returns is to be given to `show_own` after it."""
        before = self._parameters.keys() - self._showing_shared.keys()
        self.show_shared(before, raise_version=False)
        return before

    def raise_versions(self) -> None:
        """Refuse graphs from before: parameters were written, whichever model they show."""
        torch.autograd.graph.increment_version(self.held.values())
        for name in self._showing_shared:
            self._showing_shared[name] += 1

    def after_load(self, mean: Sequence[Tensor]) -> None:
        """Go on from w, m and x that were loaded, and from this c."""
        self._due = [[] for _ in self.units]
        for name, narrow in self._narrow.items():
            narrow.copy_(self._w[name])
        self.set_mean(mean)

    def point_again(self) -> None:
        """Point parameters to the models that were loaded. What was written to them before went with what
        they showed, also where a distributed checkpoint wrote it there."""
        torch.autograd.graph.increment_version(self.held.values())
        for name in self._parameters:
            if name in self._showing_shared:
                self.point(name, self._shown[name])
                self._showing_shared[name] = version_of(self.held[name])
            else:
                self.point(name, self._x[name])

    def end(self) -> None:
        """Leave w in the memory that the parameters had before."""
        self.show_shared()
        for name in self._parameters:
            self.point(name, self._x[name].copy_(self._shown[name]))
        self._showing_shared = {}

    def point(self, name: str, memory: Tensor) -> None:
        self._parameters[name].data = memory

    # -- checkpoints ------------------------------------------------------------------------------------

    def memories(self) -> dict[str, Tensor]:
        """Return views of w and m by kind/parameter; "mark" is m's name in all checkpoints."""
        kinds = {"shared": self._w, "mark": self._m}
        return {f"{kind}/{name}": part for kind, parts in kinds.items() for name, part in parts.items()}


@dataclass(frozen=True, slots=True)
class ResidualView:
    """e of one unit, a `Vector`: computed where it is read."""

    models: Models
    index: int
    buffers: list[Tensor]  # the one that `between` computes into, once there is one

    @property
    def reference(self) -> Tensor:
        return self.models.reference[self.index]

    @property
    def device(self) -> torch.device:
        return self.reference.device

    @property
    def dtype(self) -> torch.dtype:
        return self.reference.dtype

    def numel(self) -> int:
        return self.reference.numel()

    def between(self, start: int, stop: int) -> Tensor:
        if not self.buffers or self.buffers[0].numel() < stop - start:
            # New memory costs more than what is written to it: as long as it suffices, the same again.
            self.buffers[:] = [self.reference.new_empty(stop - start)]
        out = self.buffers[0][: stop - start]
        for here, own in self.models.pieces(self.index, start, stop):
            residual(self.reference[here], own, out[here.start - start : here.stop - start])
        return out

    def select(
        self, start: int, stop: int, threshold: float, capacity: int, phase: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        if self.device.type != "cpu":
            return select(self.between(start, stop), threshold, capacity, phase)
        found, there = [self.reference.new_empty(0, dtype=torch.long)], [self.reference.new_empty(0)]
        for here, own in self.models.pieces(self.index, start, stop):
            indices, values = residual_above(self.reference[here], own, threshold)
            found.append(indices.add_(here.start - start))
            there.append(values)
        return window(torch.cat(found), torch.cat(there), stop - start, threshold, capacity, phase)

    def at(self, host: Host, indices: Tensor) -> Tensor:
        reference = self.reference.index_select(0, indices)
        own = self.models.own_at(self.index, Sparse(indices, reference, self.numel(), host))
        residual(reference, own, own)
        return own


def _concatenated(unit: Unit, own: Mapping[str, Tensor]) -> Tensor:
    parts = [own[slot.name].to(unit.dtype) for slot in unit.slots]
    return torch.cat(parts) if parts else torch.empty(0, dtype=unit.dtype, device=unit.device)


def _overlaps(slots: Iterable[Slot], here: slice) -> Iterator[tuple[Slot, slice]]:
    for slot in slots:
        first, last = max(here.start, slot.start), min(here.stop, slot.stop)
        if first < last:
            yield slot, slice(first, last)


def _without(due: Iterable[Due], names: Set[str]) -> list[Due]:
    """Return what is left to do, once it was done in these parameters."""
    return [Due(each.where, left) for each in due if (left := each.names - names)]


def _moved(reference: Tensor, own: Tensor, spent: Tensor) -> Tensor:
    """Return the reference that makes the residual smaller by what was spent. It is exactly x where nothing
    is left: of which all was sent, that is the shared model to the last bit. What is not finite is dropped.
    """
    left = (reference - own) - spent
    return own + torch.where(left.isfinite(), left, 0.0)


def _apart(part: Tensor) -> Tensor:
    """Return the same memory as a storage of its own. All parameters are parts of one long vector; savers
    take tensors in one storage for tied ones and keep one of them (Accelerate), or write all of it for each.
    """
    # Not from the tensor itself: its `__dlpack_device__` refuses every device from outside of torch.
    return part if part.numel() == 0 else from_dlpack(to_dlpack(part.detach()))


def _check_place(name: str, parameter: Tensor, expected: Tensor) -> None:
    here = parameter.device, parameter.dtype, parameter.shape, strides_that_count(parameter)
    there = expected.device, expected.dtype, expected.shape, strides_that_count(expected)
    if here != there:
        raise ConfigError(
            f"parameter {name!r} was moved, cast or reshaped after attach() (now {parameter.dtype} "
            f"{tuple(parameter.shape)} on {parameter.device}): do it before, or close() and attach again"
        )
