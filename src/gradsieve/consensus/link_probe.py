"""How much a sync sends, where nobody fixed it, and how collectives are carried: by what the links hold."""

from __future__ import annotations

from dataclasses import replace

from gradsieve.comm.links import Links, nominal
from gradsieve.comm.rounds import Rounds, measure_all
from gradsieve.pipeline.budget import LEAST, Adaptive, spend
from gradsieve.pipeline.costs import link_seconds, with_piggyback
from gradsieve.replica.replica import Replica
from gradsieve.types import Ctx


def know_the_links(replica: Replica, spends: bool, chooses_period: bool, may_go_dense: bool) -> None:
    """`spends`: as many bits as hide, and not as many as a density gives; `chooses_period`: in as many steps
    as the rounds of an exchange take.

    Where only the way of carrying is to be known nothing is measured: a repeated run is the same bits.
    """
    pipeline, ctx = replica.pipeline, Ctx(replica.rank, replica.world, 0)
    pipeline.budget = replica.fixed
    if replica.fixed is not None or not (spends or (may_go_dense and not replica.scheme.lossless)):
        pipeline.rounds = Rounds(ctx.rank, ctx.world, nominal(ctx.world))
        return
    links: Links = replica.engine.run(measure_all(ctx, replica.device), "the links", replica.device)
    pipeline.rounds = Rounds(ctx.rank, ctx.world, links)
    if spends:
        n = sum(parameter.numel() for parameter in replica.parameters.values())
        rounds = _seconds_of_rounds(replica, links) if chooses_period else 0.0
        pipeline.budget = Adaptive.over(links, n, ctx.world, replica.settings.every, rounds)
    else:
        pipeline.fall_back(links)


def _seconds_of_rounds(replica: Replica, links: Links) -> float:
    """That an exchange takes in which next to nothing is sent: units follow each other."""
    values, density = spend(LEAST, replica.world)
    least = replace(replica.scheme, values=values, density=density)  # type: ignore[call-arg]  # stripes
    return sum(
        link_seconds(with_piggyback(least, unit.n, replica.world), links, replica.world)
        for unit in replica.pipeline.units
    )
