"""Settings other than the default ones that change which messages are sent: each must keep the laws too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gradsieve.schemes.base import Scheme
from gradsieve.schemes.baselines.topk_union import TopKUnion
from gradsieve.schemes.deft import Deft
from gradsieve.schemes.exdyna import ExDyna
from gradsieve.schemes.micro import Micro
from gradsieve.schemes.oktopk import OkTopk
from gradsieve.schemes.spardl import SparDL
from gradsieve.schemes.stripes import Stripes
from gradsieve_tools.baselines.cltk import CltK
from gradsieve_tools.baselines.sidco import Sidco

Build = Callable[[float, int], Scheme[Any]]
"""From the density and the number of ranks."""


def speeds(world: int) -> tuple[float, ...]:
    return tuple(1.0 + 3.0 * (rank % 3) for rank in range(world))


def divisor(world: int, at_most: int) -> int:
    return max(d for d in range(1, at_most + 1) if world % d == 0)


def power_of_two(world: int) -> int:
    return world & -world


VARIANTS: dict[str, Build] = {
    "deft, unequal speeds": lambda density, world: Deft(density=density, speeds=speeds(world)),
    "exdyna, unequal speeds": lambda density, world: ExDyna(density=density, speeds=speeds(world)),
    "exdyna without balancing": lambda density, world: ExDyna(density=density, balance=False),
    "exdyna without control": lambda density, world: ExDyna(density=density, control=False),
    "exdyna, one block": lambda density, world: ExDyna(density=density, blocks_per_partition=1),
    "exdyna, bf16 values": lambda density, world: ExDyna(density=density, values="bf16"),
    "exdyna, int8 values": lambda density, world: ExDyna(density=density, values="int8"),
    "exdyna, sign values": lambda density, world: ExDyna(density=density, values="sign"),
    "cltk, int4 values": lambda density, world: CltK(density=density, values="int4"),
    "topk-union, int2 values": lambda density, world: TopKUnion(density=density, values="int2"),
    "stripes, int4 values": lambda density, world: Stripes(density=density, values="int4"),
    "micro, bf16 values": lambda density, world: Micro(density=density, values="bf16"),
    "micro without control": lambda density, world: Micro(density=density, control=False),
    "oktopk, other periods": lambda density, world: OkTopk(
        density=density, local_period=1, global_period=3, region_period=2
    ),
    "sidco, gamma": lambda density, world: Sidco(density=density, fit="gamma"),
    "sidco, pareto": lambda density, world: Sidco(density=density, fit="pareto"),
    "spardl, auto": lambda density, world: SparDL(density=density, teams="auto"),
    "spardl, b-sag": lambda density, world: SparDL(density=density, teams=divisor(world, 4)),
    "spardl, all teams": lambda density, world: SparDL(density=density, teams=world),
    "spardl, r-sag": lambda density, world: SparDL(
        density=density, teams=power_of_two(world), across="r-sag"
    ),
}
