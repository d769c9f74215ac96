"""Ranks of one scheme, from the first step to the last, and the verdict on each."""

from __future__ import annotations

import tempfile
from collections.abc import Callable

from gradsieve.errors import GradsieveError
from gradsieve_tools.chaos.fleet import DONE, Fleet
from gradsieve_tools.emulation.stores import store_at
from gradsieve_tools.soak.rank import Soak, be_rank
from gradsieve_tools.soak.verdicts import Line, Look, verdict_of

WORLD = 2
_START_SECONDS, _STEP_SECONDS = 120.0, 0.2  # seconds, on a machine busy with other work


def soaked(
    scheme: str, steps: int, life: Callable[..., None] = be_rank
) -> tuple[list[Line], list[list[Look]]]:
    """The verdicts, and all looks by rank; `life` is what a rank's process runs."""
    store = store_at("127.0.0.1")
    with tempfile.TemporaryDirectory(prefix="gradsieve-soak-") as folder:
        soak = Soak(scheme, steps, WORLD, store.port, folder)
        arguments = [(rank, soak) for rank in range(WORLD)]
        endings = Fleet(be_rank.__module__).run(life, arguments, _START_SECONDS + _STEP_SECONDS * steps)
    lines, seen = list[Line](), list[list[Look]]()
    for rank, ending in enumerate(endings):
        if ending.exit_code != DONE:
            raise GradsieveError(
                f"{scheme}: rank {rank} ended with code {ending.exit_code} instead of {steps} steps; "
                f"{ending.stacks[-1500:] or 'its error stands above'}"
            )
        looks = [Look(int(each[0]), *each[1:]) for each in ending.message("looks").get("looks", [])]
        lines += verdict_of(scheme, rank, looks, steps)
        seen.append(looks)
    return lines, seen
