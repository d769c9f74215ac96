"""SparDL with the rules and constants of the paper and its release, to compare `spardl.py` against.

Written from a description of the method; no line of the published code, which has no licence, was used.

1. Of Q blocks of c = ceil(n / Q) elements, each sends floor(c density) of them, in every step alike: the
   largest once all that was received has been added.
2. B-SAG: h begins at the d-th part of that and moves by a hundredth of the rest, where that is one or more.

All else is in `spardl.py`: Spar-Reduce-Scatter, R-SAG, B-SAG, the all-gather, residual collection.

Kept out are crashes (blocks with less than one element to send, teams of unequal size) and an h beyond the
block's part of k. What R-SAG drops is shared by all teams that drop it, where the release has half of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradsieve.errors import ConfigError
from gradsieve.schemes.base import log2_ceil
from gradsieve.schemes.spardl import SparDL
from gradsieve.types import target_count


@dataclass(frozen=True, kw_only=True)
class SparDLPaper(SparDL):
    # Into how many moves the way of h from the least to the most is divided at first.
    moves: int = 100

    whole_model: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.moves < 1:
            raise ConfigError(f"moves must be at least 1, not {self.moves}")

    # 1.
    def quotas(self, n: int, places: int, step: int) -> Tensor:
        return torch.full((places,), self.part(n, places), dtype=torch.long, device="cpu")

    def part(self, n: int, places: int) -> int:
        return target_count(self.density, -(-n // places))

    def candidates(self, quotas: Tensor) -> int:
        return int(quotas.max()) * (1 + log2_ceil(quotas.numel()))

    # 2.
    def first_move(self, part: int, kept: int) -> int:
        return (part - kept) // self.moves
