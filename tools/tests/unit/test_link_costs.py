"""Links, and the backend's own collectives, are measured alike on all ranks."""

from __future__ import annotations

import torch

from gradsieve.comm import lockstep
from gradsieve.comm.ops import FEW
from gradsieve.types import Ctx
from gradsieve_tools.link_costs import measure_all


def test_links_and_the_backends_own_collectives_are_measured_alike() -> None:
    for world in (FEW, FEW + 1):
        seen = lockstep.run([measure_all(Ctx(rank, world, 0), torch.device("cpu")) for rank in range(world)])
        assert len(set(seen)) == 1
        assert (seen[0].gather > 0) == (seen[0].sum > 0) == (world > FEW)
