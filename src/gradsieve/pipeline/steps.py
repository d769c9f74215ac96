"""Exchange of steps: every rank's optimizer steps the rank's own model, and what it moved is exchanged.

    offer       e, the residual: what this rank's steps moved and it has not sent to the others yet
    exchange    the scheme, while backward computes the next gradient; nothing that backward reads is written
    complete    shared model -= update / P;  e -= spent;  nor is anything here
    rebase      own model = shared model - preview * e, where something was sent and by windows
    step        the optimizer, with this rank's own gradient

With `every` above 1 all but the last of so many steps are the optimizer's alone. A gradient knows the
others' steps one step after they were sent, and its own rank's at once. A rank whose gradient is not finite
takes no step and has nothing new to send; the others go on.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gradsieve.coherence import Coherence, probe, sample_count, sample_indices, squares, with_square
from gradsieve.errors import ConfigError
from gradsieve.kernels import finite, is_finite
from gradsieve.models import WINDOWS
from gradsieve.optimizers import traits_of
from gradsieve.pipeline.base import TRAINING, MakeModels, Pending, Pipeline
from gradsieve.pipeline.budget import Budget, Timer
from gradsieve.pipeline.exchange_settings import Steps
from gradsieve.pipeline.frame import CHECKSUM_WORDS
from gradsieve.pipeline.tags import WORDS
from gradsieve.schemes.base import Scheme
from gradsieve.step_length import StepLength
from gradsieve.types import Outcome, Program, Sparse, Vector, to_device, to_host
from gradsieve.units import Unit, flat_view

# Own noise is measured over so many steps at least: in one step the rounding of the sum is as large as what
# was moved.
LEAST_STEPS = 3
_log = logging.getLogger("gradsieve")

FEWEST_BITS = 0.025  # of an exchange, however much rides along: what is sent has to move
WELL_KNOWN = 16  # ranks up to which losses were measured with more than one seed


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of a unit's exchange, and the summed probes."""

    outcome: Outcome[Any]
    probes: Tensor


Offer = tuple[Tensor | Vector, Tensor]  # the residual, and the probes


class StepPipeline(Pipeline):
    exchanges_steps = True
    settings: Steps

    def set_up(self, models: MakeModels) -> None:
        self.models = models(self.parameters, self.units)
        self.coherence, self.agreement = Coherence(), Coherence()  # of residuals; and of gradients
        self.preview = 1.0
        self._moved = True  # whether this rank took a step since the last exchange began
        words = sum(1 + sample_count(unit.n) + WORDS + CHECKSUM_WORDS for unit in self.units)
        # Bits a parameter that travel in addition to the scheme's own.
        self._piggyback_bits = 32.0 * words * 2.0 * (self.world - 1) / self.world / max(1, self.elements)
        # Bits of an exchange, and what the scheme makes of them.
        self._spends: tuple[float, Scheme[Any]] | None = None
        # Sampled gradients of the last step, by unit; and the exchange that they are for.
        self._samples: list[Tensor] = []
        self._sampled_for = -1
        self._length = StepLength(self.models.own, self.models.held)
        traits = [traits_of(each, group) for each in self.optimizers for group in each.param_groups]
        if self.world > 1 and self.scheme.round_robin and any(each.has_moments for each in traits):
            self.models.track_mean()

    # -- an exchange ------------------------------------------------------------------------------------

    def offers(self, call: str, gradients: Mapping[str, Tensor] | None) -> list[Offer]:
        """Return copies of all that the exchange will read, if optimizers write while it is pending."""
        if call == TRAINING:
            self.idle, self._moved = 0 if self._moved else self.idle + 1, False
        if self.settings.overlap == 1:
            return []
        offers = (self._offer(index) for index in range(len(self.units)))
        return [(residual.between(0, residual.numel()), probes) for residual, probes in offers]

    def program(self, pending: Pending, index: int) -> Program[None]:
        """Exchange unit `index`. Models are written in `complete` and `rebase`, and only there."""
        self.check_order(pending, index)
        with pending.stats.timeline.stage("accumulate", index):
            residual, probes = pending.offers[index] if pending.offers else self._offer(index)
        outcome, total = yield from self.exchange(pending, index, residual, probes, pending.is_flush)
        pending.results.append(Result(outcome, total))

    def scheme_of_this_step(self) -> Scheme[Any]:
        if self.budget is None:
            return self.scheme
        bits = max(self.settings.every * self.budget.bits - self._piggyback_bits, FEWEST_BITS)
        if self._spends is None or self._spends[0] != bits:
            sizes = [tuple(unit.sizes) for unit in self.units if unit.n]
            self._spends = bits, self.scheme.at_bits(bits, self.world, sizes)
        return self._spends[1]

    def dense_density(self) -> float:
        """Return what sends no more of small tensors than of all others: they cost more than these else."""
        most = max(1, sum(self.scheme.k(unit.n) for unit in self.selected))
        return min(1.0, most / max(1, self.elements - sum(unit.n for unit in self.selected)))

    def probe_offer(self) -> tuple[Vector, Tensor]:
        return self._offer(0)

    def _offer(self, index: int) -> tuple[Vector, Tensor]:
        residual = self.models.residual(index, is_lent=True)
        if self.probes_gradients:
            return residual, with_square(self.samples()[index])
        return residual, probe(residual, self.step)

    @property
    def probes_gradients(self) -> bool:
        """Whether the exchange of this step carries probes of gradients; otherwise they are of residuals. The
        two take turns by the number of the exchange, which is the same on all ranks, so that both coherences
        are measured with the words of one."""
        return self.step % 2 == 1

    @property
    def _next_probe(self) -> int:
        """The number of the next exchange that probes gradients, from this one on."""
        return self.step | 1

    def sample_gradients(self, gradients: Mapping[str, Tensor | None], scale: float = 1.0) -> None:
        """Keep samples of the flat gradients, times `scale`, by which an optimizer is about to step: the next
        exchange that probes gradients carries them. That is not this one in every second step, and then the
        next step samples; but if several exchanges belong to a step, this may be so in all of them."""
        if not (self.probes_gradients or self.idle):
            return
        samples = self.samples()
        for index, unit in enumerate(self.units):
            places = sample_indices(unit.sizes, self._next_probe)
            sizes = [here.size for here in places]
            every = to_device([place for here in places for place in here.tolist()], torch.int64, unit.device)
            parts = list(torch.split(samples[index], sizes))
            for number, (slot, at) in enumerate(zip(unit.slots, torch.split(every, sizes), strict=True)):
                gradient = gradients.get(slot.name)
                if gradient is not None and at.numel():
                    found = gradient.index_select(0, at).to(unit.dtype)
                    parts[number] = found if scale == 1.0 else found * scale
            samples[index] = torch.cat(parts)
        self._samples, self._sampled_for = samples, self._next_probe

    def samples(self) -> list[Tensor]:
        """Return 0 where this rank took no step: it then says nothing about the others' agreement."""
        if self._sampled_for == self._next_probe:
            return self._samples
        lengths = (sample_count(unit.n) if unit.n else 0 for unit in self.units)
        return [
            torch.zeros(length, dtype=unit.dtype, device=unit.device)
            for unit, length in zip(self.units, lengths, strict=True)
        ]

    def complete(self, pending: Pending) -> bool:
        """Apply the exchange. Parameters are only read. A sum that overflowed is the same on all ranks, and
        they all leave it in the residual."""
        self.last, results, timeline = pending, pending.results, pending.stats.timeline
        pending.offers = None
        self.models.notice_writing()
        with timeline.stage("apply"):
            updates = [result.outcome.update for result in results]
            sampled = torch.cat([squares(result.probes) for result in results])
            bounded = finite(*(update.bounds() for update in updates))
            found = to_host(torch.cat([sampled, bounded.to(sampled)[None]]))  # one wait
            measured, are_bounded = found[:-1].reshape(-1, 2), bool(found[-1])
            good = are_bounded or is_finite(*(update.values for update in updates))
        if not good:
            self.skipped += 1
            return False
        if self.probes_gradients:
            samples = sum(result.probes.numel() - 1 for result in results)
            self.agreement = self.agreement.after(measured, self.world, self.step, samples)
        else:
            self.coherence = self.coherence.after(measured, self.world, self.step)
        self.preview = self.coherence.share(self.world)
        for index, (unit, result) in enumerate(zip(self.units, results, strict=True)):
            update, spent = result.outcome.update, result.outcome.spent
            with timeline.stage("apply", index):
                self.models.apply(index, update, spent, self.world)
                self.models.make_due(index, self._places_due(unit, update, spent))
                if self._is_noise_due(update):
                    self.models.look_for_noise(index, slice(update.start, update.stop))
        with timeline.stage("commit"):
            self.commit(pending)
            if not pending.is_flush and (timing := self.timing) is not None:
                self.follow(timing.after())
        if pending.is_flush:
            self.models.set_mean(())
        return True

    def _places_due(self, unit: Unit, update: Sparse, spent: Sparse) -> Iterator[slice | Sparse]:
        """Yield what is to be rebased: where something was applied, and a window, unless all elements come
        round sooner; all of it where windows would come round only every WINDOWS periods."""
        if self.settings.every > 1:
            yield slice(0, unit.n)
            return
        comes_round = unit.is_dense or self.scheme.round_robin
        if not (comes_round and update.count * WINDOWS >= update.numel):
            turn = self.step % WINDOWS
            yield slice(unit.n * turn // WINDOWS, unit.n * (turn + 1) // WINDOWS)
        yield update
        if spent.indices is not update.indices:
            yield spent

    def _is_noise_due(self, update: Sparse) -> bool:
        """Whether noise is measured there: in some turns of a stretch that comes round more often."""
        if update.indices is not None or not update.count:
            return False
        turns = max(1, round(LEAST_STEPS * update.count / (update.numel * self.settings.every)))
        return (self.step * update.count // update.numel) % turns == turns - 1

    # -- steps of optimizers ----------------------------------------------------------------------------

    def note_step(self, is_finite: bool) -> None:
        self.last_step_good = is_finite
        self.skipped += not is_finite
        self._moved |= is_finite

    def before_update(self, optimizer: Any, names: Set[str]) -> None:
        scale = getattr(optimizer, "grad_scale", None)  # a fused optimizer takes it off by itself
        every = {name: _flat_gradient(self.parameters[name]) for name in names}
        self.sample_gradients(every, 1.0 if scale is None else 1.0 / float(scale))
        stepped = {name for name, gradient in every.items() if gradient is not None}
        self._length.before(optimizer, stepped, self.models.noise(names), self.rho, self.agreement.size)

    def after_update(self) -> None:
        self._length.after()

    def at_rest(self, names: Set[str]) -> None:
        for optimizer in self.optimizers:
            stepped = {name for group in optimizer.param_groups for name in self._length.names_in(group)}
            self._length.take_out(optimizer, self.models.noise(names & stepped))

    # -- the budget -------------------------------------------------------------------------------------

    def choose_budget(self, fixed: Budget | None, is_chosen: bool, may_wait: bool) -> None:
        self.budget = fixed
        if is_chosen:
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

    def rebase(self, names: Set[str] | None = None) -> None:
        with self.stats.timeline.stage("commit"):
            self.models.rebase(self.preview, names)

    # -- state ------------------------------------------------------------------------------------------

    def after_load(self, samples: Sequence[Tensor], mean: Sequence[Tensor]) -> None:
        self._samples = [part.to(self.units[at].device, copy=True) for at, part in enumerate(samples)]
        self._sampled_for = self._next_probe if samples else -1
        self.models.after_load(mean)

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

    def figures_among(
        self, figures: Mapping[str, float], old: int, residuals_differ: bool
    ) -> dict[str, float]:
        """If residuals are the same on all ranks now, a rank believes all of its own."""
        residuals = Coherence(figures["alike"], figures["all"]) if residuals_differ else Coherence()
        gradients = Coherence(figures["gradients_alike"], figures["gradients_all"], figures["gradients_seen"])
        residuals, gradients = (measured.among(old, self.world) for measured in (residuals, gradients))
        return {
            **figures,
            "preview": residuals.share(self.world),
            "alike": residuals.numerator,
            "all": residuals.denominator,
            "gradients_alike": gradients.numerator,
            "gradients_all": gradients.denominator,
            "gradients_seen": gradients.samples,
            **({} if old == self.world else {"budget": 0.0, "every": 0.0}),  # others need other bits
        }

    def replicated(self) -> tuple[dict[str, Tensor], list[float]]:
        shared = {
            key.removeprefix("shared/"): part
            for key, part in self.memories().items()
            if key.startswith("shared/")
        }
        return shared, [*self.figures().values()]

    def report(self) -> dict[str, float]:
        budget = 0.0 if self.budget is None else self.budget.bits
        return {"preview": self.preview, "rho": self.rho, "budget": budget}

    @property
    def rho(self) -> float:  # type: ignore[override]  # a constant where gradients are exchanged
        return self.agreement.share(self.world)

    def residuals(self) -> Iterator[Tensor]:
        return (self.models.residual(index).between(0, unit.n) for index, unit in enumerate(self.units))

    def remaining_norm(self, pending: Pending) -> float:
        norms = []
        for residual, result in zip(self.residuals(), pending.results, strict=True):
            result.outcome.spent.subtract_from(residual)
            norms.append(float(residual.norm()))
        return math.hypot(*norms)

    def memories(self) -> dict[str, Tensor]:
        return self.models.memories()

    def kept(self) -> dict[str, Tensor]:
        return self.memories() | {f"own/{name}": own for name, own in self.models.own.items()}


def _flat_gradient(parameter: Tensor) -> Tensor | None:
    """Return `.grad` in the order in which the parameter's elements lie in memory; an expanded or transposed
    one is copied, a sparse one refused."""
    gradient = parameter.grad
    if gradient is None:
        return None
    if gradient.layout != torch.strided:
        raise ConfigError("a parameter has a sparse gradient: use Embedding(sparse=False)")
    if gradient.stride() != parameter.stride():
        gradient = torch.empty_like(parameter).copy_(gradient)
    return flat_view(gradient)
