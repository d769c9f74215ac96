"""How much a sync sends, where nobody fixed it, and how collectives are carried: by what the links hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradsieve.comm.links import Links, nominal
from gradsieve.comm.rounds import Rounds, measure_all
from gradsieve.sync.budget import Adaptive
from gradsieve.types import Ctx

if TYPE_CHECKING:
    from gradsieve.integrations.gradient_sync import GradientSync


def know_the_links(sync: GradientSync, spends: bool, dense_if_faster: bool) -> None:
    """`spends`: as many bits as hide, and not as many as a density gives.

    Where only the way of carrying is to be known nothing is measured: a repeated run is the same bits.
    """
    pipeline, ctx = sync.pipeline, Ctx(sync.engine.rank, sync.engine.world, 0)
    pipeline.budget = sync.fixed
    if sync.fixed is not None or not (spends or (dense_if_faster and not sync.scheme.lossless)):
        pipeline.rounds = Rounds(ctx.rank, ctx.world, nominal(ctx.world))
        return
    links: Links = sync.engine.run(measure_all(ctx, sync.device), "the links", sync.device)
    pipeline.rounds = Rounds(ctx.rank, ctx.world, links)
    if spends:
        n = sum(parameter.numel() for parameter in sync.parameters.values())
        pipeline.budget = Adaptive.over(links, n, ctx.world, sync.treatment.every)
    else:
        pipeline.fall_back(links)
