"""How much a sync sends, where nobody fixed it: by what the links hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradsieve.comm.links import Links, measure_links
from gradsieve.sync.budget import Adaptive
from gradsieve.types import Ctx

if TYPE_CHECKING:
    from gradsieve.integrations.gradient_sync import GradientSync


def find_budget(sync: GradientSync, spends: bool, dense_if_faster: bool) -> None:
    """`spends`: as many bits as hide, and not as many as a density gives."""
    if sync.fixed is not None:
        sync.pipeline.budget = sync.fixed
        return
    if not spends and (sync.scheme.lossless or not dense_if_faster):
        return
    program = measure_links(Ctx(sync.engine.rank, sync.engine.world, 0), sync.device)
    links: Links = sync.engine.run(program, "the links", sync.device)
    if spends:
        n = sum(parameter.numel() for parameter in sync.parameters.values())
        sync.pipeline.budget = Adaptive.over(links, n, sync.engine.world, sync.treatment.every)
    else:
        sync.pipeline.fall_back(links)
