"""The time of a step, and what an option uses.

    hidden behind   a step takes                                     who
    step            forward + max(backward, link) + computed         gradsieve: one step late
    backward        forward + max(backward/B + X, backward + X/B)    torch's DDP, B buckets
    nothing         compute + link + computed                        published rules; and gradsieve where
                                                                     forward and backward keep the processors
                                                                     busy that select and send

X = link + computed. `computed` is the processor time of the exchange, which shares the processor with forward
and backward. Of B buckets the first can go when 1/B of backward is done, and the last only after all of it.
With an exchange in every H-th step the others take compute alone; the part of an exchange that is longer than
the steps it may hide behind, one or `overlap`, is a wait.

Left out: waiting for a slow rank, which all options share; several ranks on one link.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from gradsieve.comm.links import Links
from gradsieve_tools.costs import APART, Cost, Costs, Host, with_rings
from gradsieve_tools.link_costs import WORD
from gradsieve_tools.plan.options import Model, Option
from gradsieve_tools.profiles import Profile

_DAY = 86_400
_GB = 1e9


@dataclass(frozen=True, slots=True)
class Prediction:
    option: Option
    cost: Cost
    step: float  # seconds, mean over a period
    # What a step sends over what a rank's link carries one way during a step without communication, as `bench
    # step` measures it: above 1 it cannot be hidden
    of_link: float
    bits: float  # moved by the busiest rank, a parameter and step
    gb_a_day: float  # sent by all ranks together

    @property
    def to_loss(self) -> float | None:
        """Seconds until dense's loss, for each step that dense needs; None where that was not measured."""
        steps = self.option.gap.steps
        return None if steps is None else steps * self.step

    def waited(self, model: Model) -> float:
        """Seconds of a step beyond computing."""
        return self.step - model.compute


def costs_of(profile: Profile) -> Costs:
    """Use the median pair, or the slowest if it is clearly behind: every collective waits for it."""
    median, slowest, ring = profile.links, profile.slowest_links, profile.ring
    latency = slowest.latency if slowest.latency > APART * median.latency else median.latency
    word = slowest.word if slowest.word > APART * median.word else median.word
    host = Host(profile.memory, profile.selection, profile.message, launch=profile.launch)
    is_slower = (latency, word) != (median.latency, median.word)
    rings = replace(ring, sum=ring.latency) if ring is not None and is_slower else None
    return Costs(profile.world, with_rings(Links(latency, word), profile.world), host, rings)


def predict(option: Option, model: Model, costs: Costs) -> Prediction:
    cost = option.price(costs)
    step = seconds(option, cost, model)
    words = cost.words / option.every
    return Prediction(
        option,
        cost,
        step,
        of_link=words * costs.links.word / model.compute,
        bits=8 * WORD * words / model.parameters,
        gb_a_day=WORD * words * costs.world * _DAY / step / _GB,
    )


def seconds(option: Option, cost: Cost, model: Model) -> float:
    match option.hidden:
        case "step" if not model.on_host:
            behind = (option.overlap - 1) * model.compute + model.backward
            waited = max(0.0, cost.link - behind)
            return model.compute + (waited + cost.computed) / option.every
        case "backward":
            exchange, part = cost.link + cost.computed, 1 / option.buckets
            behind = max(part * model.backward + exchange, model.backward + part * exchange)
            exchanging = model.forward + behind
        case _:
            exchanging = model.compute + cost.link + cost.computed
    return ((option.every - 1) * model.compute + exchanging) / option.every
