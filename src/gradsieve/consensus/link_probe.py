"""How much a sync sends, where nobody fixed it, and how collectives are carried: by what the links hold."""

from __future__ import annotations

from gradsieve.comm.links import Links, nominal
from gradsieve.comm.rounds import Rounds, measure_all
from gradsieve.pipeline.budget import Adaptive
from gradsieve.replica.replica import Replica
from gradsieve.types import Ctx


def know_the_links(replica: Replica, spends: bool, may_go_dense: bool) -> None:
    """`spends`: as many bits as hide, and not as many as a density gives.

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
        pipeline.budget = Adaptive.over(links, n, ctx.world, replica.settings.every)
    else:
        pipeline.fall_back(links)
