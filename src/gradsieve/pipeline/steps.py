"""Exchange of steps: every rank's optimizer steps the rank's own model, and what it moved is exchanged.

    waiting      e, the residual: what this rank's steps moved and it has not sent to the others yet
    exchange     the scheme, while backward computes the next gradient; nothing that backward reads is written
    complete     shared model -= update / P;  e -= spent;  nor is anything here
    rebase       own model = shared model - preview * e, where something was sent and by windows
    step         the optimizer, with this rank's own gradient

With `every` above 1 all but the last of so many steps are the optimizer's alone. A gradient knows the
others' steps one step after they were sent, and its own rank's at once. A rank whose gradient is not finite
takes no step and has nothing new to send; the others go on.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gradsieve.coherence import Coherence, probe, sample_count, sample_indices, squares, with_square
from gradsieve.comm.ops import Meter
from gradsieve.feedback.local_steps import WINDOWS, LocalSteps, Noise
from gradsieve.feedback.units import Slot, flat_view
from gradsieve.kernels import finite, is_finite
from gradsieve.pipeline.base import UNIT_CAP_MB, Memory, Pipeline, Stats
from gradsieve.pipeline.budget import Budget, Timer
from gradsieve.pipeline.exchange_settings import Steps
from gradsieve.pipeline.frame import CHECKSUM_WORDS
from gradsieve.pipeline.tags import WORDS
from gradsieve.schemes.base import Scheme
from gradsieve.types import Host, Outcome, Program, Sparse, Vector, to_device, to_host

# Own noise is measured over so many steps at least: in one step the rounding of the sum is as large as what
# was moved.
LEAST_STEPS = 3
# Elements in which it is measured together: on a processor as many as stay in its cache from the first pass
# to the last, on an accelerator more, where what counts is launches.
CHUNK, LARGE_CHUNK = 1 << 16, 1 << 22


_log = logging.getLogger("gradsieve")

FEWEST_BITS = 0.025  # of an exchange, however much rides along: what is sent has to move
WELL_KNOWN = 16  # ranks up to which losses were measured with more than one seed


@dataclass(frozen=True, slots=True)
class Staged:
    """What a unit's exchange gave."""

    outcome: Outcome[Any]
    dense: Outcome[None]
    """Of the dense slots, those whose turn it was in the round robin."""
    probes: Tensor


class StepPipeline(Pipeline):
    exchanges_steps = True
    settings: Steps

    def __init__(
        self,
        parameters: Iterable[tuple[str, Tensor]],
        scheme: Scheme[Any],
        rank: int,
        world: int,
        bucket_cap_mb: float = UNIT_CAP_MB,
        settings: Steps | None = None,
    ) -> None:
        named = dict(parameters)
        super().__init__(named.items(), scheme, rank, world, bucket_cap_mb, settings or Steps())
        self.own = {name: flat_view(parameter.data) for name, parameter in named.items()}
        """This rank's model, flat, by parameter. `.data`: version counters are raised by whoever knows
        which model the parameters hold (`replica/parameter_views.py`)."""
        self.local = [LocalSteps(unit, self.own) for unit in self.units]
        self._staged: list[Staged] = []
        self._arriving: list[Staged] = []
        """Of the last exchange that was completed, and of the pending one; by unit."""
        self._aside: list[tuple[Tensor | Vector, Sparse, Tensor]] = []
        self._fresh = self.stats
        self.coherence = Coherence()
        """Of residuals; and of gradients."""
        self.agreement = Coherence()
        self.preview = 1.0
        words = sum(1 + sample_count(unit.n) + WORDS + CHECKSUM_WORDS for unit in self.units)
        elements = sum(slot.numel for unit in self.units for slot in unit.slots)
        self._piggyback_bits = 32.0 * words * 2.0 * (world - 1) / world / max(1, elements)
        """Bits a parameter that travel in addition to the scheme's own."""
        self._spends: tuple[float, Scheme[Any]] | None = None
        """Bits of an exchange, and what the scheme makes of them."""
        self._noted: dict[str, Tensor] = {}
        self._noted_for = -1
        """Gradients of the last step at the elements looked at, by parameter; and for which exchange."""

    def program(
        self, index: int, tensors: Mapping[str, Tensor], everything: bool = False, call: int = 0
    ) -> Program[None]:
        """Exchange unit `index`, given flat parameters; they are written in `rebase`, and only there."""
        if index == 0:
            self._arriving = []
            self._fresh = Stats(Meter(self.rank, self.world))
            if not self._aside:
                self._begins()
        self.in_order(index, len(self._arriving))
        stats = self._fresh
        with stats.timeline.stage("accumulate", index):
            offered = self._aside[index] if self._aside else self._offer(index, tensors, everything)
            waiting, dense, piggyback = offered
        outcome, ride = yield from self.exchange(index, waiting, piggyback, stats, everything, call)
        total = replace(dense, source=ride[: dense.count])
        self._arriving.append(Staged(outcome, Outcome(total, dense, None), ride[dense.count :]))

    def begin(self, tensors: Mapping[str, Tensor], everything: bool, moved: bool) -> None:
        self.idle = 0 if moved else self.idle + 1
        if self.settings.overlap > 1:
            self.snapshot(tensors, everything)

    def snapshot(self, own: Mapping[str, Tensor], everything: bool) -> None:
        """Copy all that the exchange which begins now will read: optimizers write while it is pending."""
        self._begins()
        self._aside = []
        for index, unit in enumerate(self.units):
            waiting, dense, piggyback = self._offer(index, own, everything)
            self._aside.append((waiting.between(0, unit.n), dense, piggyback))

    def _begins(self) -> None:
        self.began_at = self.since
        self._staged = []

    def scheme_of_this_step(self) -> Scheme[Any]:
        if self.budget is None:
            return self.scheme
        bits = max(self.settings.every * self.budget.bits - self._piggyback_bits, FEWEST_BITS)
        if self._spends is None or self._spends[0] != bits:
            sizes = [tuple(unit.sizes) for unit in self.units if unit.n]
            self._spends = bits, self.scheme.at_bits(bits, self.world, sizes)
        return self._spends[1]

    def offer(self, index: int) -> tuple[Vector, Tensor]:
        waiting, _, piggyback = self._offer(index, self.own, False)
        return waiting, piggyback

    def _offer(
        self, index: int, own: Mapping[str, Tensor], everything: bool
    ) -> tuple[Vector, Sparse, Tensor]:
        """The residual, that of dense slots, and the piggyback: these and the probes."""
        local = self.local[index]
        scheme = self.scheme_of_this_step()
        most = None if everything or scheme.is_whole else scheme.k(local.unit.n)
        here = local.dense_turn(self.step, most)
        dense = Sparse.run(here.start, local.waiting_dense(own, here), local.anchor_dense.numel())
        waiting = local.waiting(own, exchanged=True)
        probes = self._probe_gradients(index) if self.probes_gradients else probe(waiting, self.step)
        return waiting, dense, torch.cat([dense.values, probes])

    @property
    def probes_gradients(self) -> bool:
        """Whether the exchange of this step carries probes of gradients; otherwise they are of residuals. The
        two take turns by the number of the exchange, which is the same on all ranks, so that both coherences
        are measured with the words of one."""
        return self.step % 2 == 1

    def note_gradients(self, gradients: Mapping[str, Tensor | None], scale: float = 1.0) -> None:
        """An optimizer is about to step by these, flat, times `scale`; some of them are piggybacked on the
        next exchange, if that probes gradients."""
        if not self.probes_gradients:
            return
        if self._noted_for != self.step:
            self._noted, self._noted_for = {}, self.step
        for index, unit in enumerate(self.units):
            slots, places = zip(*self._looked_at(index), strict=True)
            together = [place for here in places for place in here.tolist()]
            every = to_device(together, torch.int64, unit.device)
            parts = torch.split(every, [here.size for here in places])
            found = {
                slot.name: gradient.index_select(0, at)
                for slot, at in zip(slots, parts, strict=True)
                if (gradient := gradients.get(slot.name)) is not None and at.numel()
            }
            if found:
                noted = torch.cat([each.to(unit.dtype) for each in found.values()])
                split = torch.split(noted if scale == 1.0 else noted * scale, [*map(len, found.values())])
                self._noted |= dict(zip(found, split, strict=True))

    def _looked_at(self, index: int) -> Iterator[tuple[Slot, Host]]:
        """Places in each parameter of a unit, dense ones too."""
        slots = self.units[index].slots
        yield from zip(slots, sample_indices([slot.numel for slot in slots], self.step), strict=True)

    def _probe_gradients(self, index: int) -> Tensor:
        return with_square(self._noted_in(index))

    def _noted_in(self, index: int) -> Tensor:
        """0 where this rank took no step: it then says nothing about the others' agreement."""
        unit = self.units[index]
        noted = self._noted if self._noted_for == self.step else {}
        looked_at = list(self._looked_at(index))
        longest = max((here.size for _, here in looked_at), default=0)
        none = torch.zeros(longest, dtype=unit.dtype, device=unit.device)
        return torch.cat([none[:0], *(noted.get(slot.name, none[: here.size]) for slot, here in looked_at)])

    def noted(self) -> list[Tensor]:
        return [self._noted_in(index) for index in range(len(self.units))]

    def set_noted(self, vectors: Sequence[Tensor]) -> None:
        """After the step was set."""
        self._noted, self._noted_for = {}, self.step
        for index, vector in enumerate(vectors):
            slots, places = zip(*self._looked_at(index), strict=True)
            copied = vector.to(self.units[index].device, copy=True)
            parts = torch.split(copied, [here.size for here in places])
            self._noted |= {slot.name: part for slot, part in zip(slots, parts, strict=True)}

    def complete(self, tensors: Mapping[str, Tensor]) -> bool:
        """Apply what the exchange gave, after the programs of all units. Parameters are only read.

        A sum that overflowed is the same on all ranks, and they all leave it in the residual. Then False.
        """
        stats = self.stats = self._fresh
        self._staged, self._arriving, self._aside = self._arriving, [], []
        for local in self.local:
            local.notice_writing()
        with stats.timeline.stage("apply"):
            updates = [
                each for staged in self._staged for each in (staged.dense.update, staged.outcome.update)
            ]
            looked_at = torch.cat([squares(staged.probes) for staged in self._staged])
            bounded = finite(*(update.bounds() for update in updates))
            found = to_host(torch.cat([looked_at, bounded.to(looked_at)[None]]))  # one wait
            seen, are_bounded = found[:-1].reshape(-1, 2), bool(found[-1])
            good = are_bounded or is_finite(*(update.values for update in updates))
        if not good:
            self.skipped += 1
            return False
        if self.probes_gradients:
            places = sum(staged.probes.numel() - 1 for staged in self._staged)
            self.agreement = self.agreement.after(seen, self.world, self.step, places)
        else:
            self.coherence = self.coherence.after(seen, self.world, self.step)
        self.preview = self.coherence.share(self.world)
        for index, (local, staged) in enumerate(zip(self.local, self._staged, strict=True)):
            update, spent, dense = staged.outcome.update, staged.outcome.spent, staged.dense
            soon = self.scheme.round_robin and update.count * WINDOWS >= update.numel
            window = None if soon else self.step % WINDOWS
            with stats.timeline.stage("apply", index):
                local.apply(update, spent, dense, tensors, self.world, window)
                if self.settings.every > 1:  # windows would come round only every WINDOWS periods
                    local.allow_rebase_all()
                if self._is_noise_due(update):
                    local.look_for_noise(slice(update.start, update.stop))
        with stats.timeline.stage("commit"):
            self.apply([staged.outcome.state for staged in self._staged])
            if self.timer is not None and not self._flushes:
                self.follow(self.timer.after())
        if self._flushes:
            self.set_common(())
        return True

    def follow_others(self) -> None:
        """From the first step on, find out what only this rank moved. It takes others, and a scheme in which
        all elements come round after equally many steps."""
        if self.world > 1 and self.scheme.round_robin:
            for local in self.local:
                local.follow_others()

    def _is_noise_due(self, update: Sparse) -> bool:
        """In a stretch that comes round more often than every LEAST_STEPS, in some of its turns."""
        if update.indices is not None or not update.count:
            return False
        turns = max(1, round(LEAST_STEPS * update.count / (update.numel * self.settings.every)))
        return (self.step * update.count // update.numel) % turns == turns - 1

    def noise(self, names: Set[str]) -> Iterator[Noise]:
        """What only this rank moved in these parameters, a few elements at a time."""
        for local in self.local:
            most = CHUNK if local.anchor.is_cpu else LARGE_CHUNK
            yield from local.noise(self.own, names, most)

    def common(self) -> list[Tensor]:
        return [local.common for local in self.local if local.common is not None]

    def set_common(self, vectors: Sequence[Tensor]) -> None:
        """After residuals were set. With nothing, as of a run that had none or of other ranks, what was moved
        until now was moved by all."""
        for local in self.local:
            local.agree_with_others(self.own)
        for mine, vector in zip(self.common() if vectors else (), vectors, strict=True):
            mine.copy_(vector)

    def choose_budget(self, may_wait: bool) -> None:
        """Time the first exchanges and choose by them; `may_wait`: the period, too."""
        self.timer = Timer(self.world, self.settings.every, may_wait, self.units[0].device)
        self.budget = self.timer.budget

    def follow(self, budget: Budget) -> None:
        """Send so much from the next exchange on. All ranks complete an exchange before the next one begins,
        and periods only become longer: none begins one that the others do not."""
        if budget.is_chosen and budget != self.budget and self.rank == 0:
            _log.info("step %d: from here on %s", self.step, budget)
            if self.world > WELL_KNOWN:
                _log.warning(
                    "rank 0: what quality needs was measured with up to %d ranks, not with %d: compare "
                    "losses with plain DistributedDataParallel",
                    WELL_KNOWN,
                    self.world,
                )
        self.budget = budget
        if budget.every != self.settings.every:
            self.settings = replace(self.settings, every=budget.every, overlap=budget.every)

    def needs_rebase(self, names: Set[str]) -> bool:
        return any(local.is_due(names) for local in self.local)

    def rebase(self, names: Set[str] | None = None) -> None:
        for index, local in enumerate(self.local):
            with self.stats.timeline.stage("commit", index):
                local.rebase(self.own, self.preview, names)

    def finish(self, parameters: Mapping[str, Tensor]) -> bool:
        """Both, where no optimizer moves in between."""
        good = self.complete(parameters)
        self.rebase()
        return good

    def shown(self) -> dict[str, Tensor]:
        """The shared model, flat, by parameter, in the parameter's own type."""
        return {name: part for local in self.local for name, part in local.shown().items()}

    def show_in(self, name: str, memory: Tensor) -> None:
        """Show this parameter from that memory, flat, which is kept up to date: where it has to lie apart."""
        for local in self.local:
            local.show_in(name, memory)

    def adopt(self, names: Set[str]) -> None:
        """The shared model was replaced in these parameters, alike on all ranks."""
        for local in self.local:
            local.adopt(self.own, names)

    def write_shared(self, name: str, values: Tensor) -> None:
        """The user wrote to a parameter while it held the shared model."""
        for local in self.local:
            local.write_shared(name, values)

    def renew(self) -> None:
        for local in self.local:
            local.renew()

    def figures(self) -> dict[str, float]:
        """`budget` and `every` are 0 unless gradsieve chose them."""
        chosen = self.timer is not None and self.budget is not None and self.budget.is_chosen
        return {
            "preview": self.preview,
            "alike": self.coherence.numerator,
            "all": self.coherence.denominator,
            "gradients_alike": self.agreement.numerator,
            "gradients_all": self.agreement.denominator,
            "gradients_seen": self.agreement.samples,
            "since": float(self.since),
            "budget": self.budget.bits if self.budget is not None and chosen else 0.0,
            "every": float(self.settings.every) if chosen else 0.0,
        }

    def set_figures(self, figures: Mapping[str, float]) -> None:
        self.coherence = replace(self.coherence, numerator=figures["alike"], denominator=figures["all"])
        self.agreement = Coherence(
            figures["gradients_alike"], figures["gradients_all"], figures["gradients_seen"]
        )
        self.preview, self.since = figures["preview"], int(figures["since"])
        if self.timer is not None:
            chosen = Budget(figures["budget"], int(figures["every"])) if figures["budget"] else None
            self.follow(self.timer.restart(chosen))

    @property
    def gradient_size(self) -> float:
        """Root mean square of an element of a rank's own gradient; 0: none was seen."""
        return self.agreement.size

    @property
    def rho(self) -> float:  # type: ignore[override]  # a constant where gradients are exchanged
        return self.agreement.share(self.world)

    @property
    def outcomes(self) -> list[Outcome[Any]]:
        return [staged.outcome for staged in self._staged]

    def waiting(self) -> Iterator[Tensor]:
        return (local.waiting(self.own).between(0, local.unit.n) for local in self.local)

    def waiting_norm(self) -> float:
        """Of the residual, dense slots included."""
        dense = (local.waiting_dense(self.own) for local in self.local)
        return math.hypot(*(float(part.norm()) for part in (*dense, *self.waiting())))

    def remaining_norm(self) -> float:
        """Of what will be the residual once what is staged is applied."""
        norms = []
        for local, staged in zip(self.local, self._arriving, strict=True):
            sparse, dense = local.waiting(self.own).between(0, local.unit.n), local.waiting_dense(self.own)
            staged.outcome.spent.subtract_from(sparse)
            staged.dense.spent.subtract_from(dense)
            norms += [float(sparse.norm()), float(dense.norm())]
        return math.hypot(*norms)

    def kept(self) -> dict[str, Tensor]:
        return self.memories() | {f"own/{name}": own for name, own in self.own.items()}

    def remembering(self) -> Sequence[Memory]:
        return self.local
