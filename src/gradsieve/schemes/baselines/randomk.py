"""Random-k: all ranks draw the same k elements from the step alone, and no index travels.

1. In each cycle of ceil(n / k) steps every element is sent once: a shuffle of all elements, drawn again
   for every cycle from the cycle's number, is dealt out k at a time.
2. Sum the values of this step's elements.

The shuffle is j -> (a j + b) mod n with a prime to n, so that a step needs memory and time for its k elements
only. The elements of one step are evenly spaced for that reason, at a distance of a. No value has a part in
the choice and the next cycle draws another a, so that no pattern in the gradient coincides with it for long.
What has to be random is that no element is favoured, and each is sent exactly once in every cycle.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from gradsieve.schemes.base import Agreed, Stateless, sum_agreed
from gradsieve.types import Ctx, Outcome, Program, Sparse

# Keeps a * k + n below 2^63.
_PRODUCT = 1 << 62


@dataclass(frozen=True, kw_only=True)
class RandomK(Agreed[Stateless]):
    def begin(self, n: int, world: int, previous: Stateless | None = None) -> Stateless:
        return Stateless()

    def step(self, acc: Tensor, state: Stateless, ctx: Ctx) -> Program[Outcome[Stateless]]:
        n = acc.numel()
        # 1.
        picked = turn(n, self.k(n), ctx.step, acc.device)
        # 2.
        total, given = yield from sum_agreed(acc[picked], self.values, ctx)
        return Outcome(Sparse(picked, total, n), Sparse(picked, given, n), state)


def turn(n: int, k: int, step: int, device: torch.device) -> Tensor:
    """Returns the sorted indices whose turn it is; in the last step of a cycle those that are left."""
    if not n:
        return torch.empty(0, dtype=torch.long, device=device)
    cycle, place = divmod(step, -(-n // k))
    # Python's generator, since it gives the same numbers with every device and version of torch.
    source = Random(cycle)
    offset, stride = source.randrange(n), 0
    while math.gcd(stride, n) != 1:
        stride = source.randrange(1, 1 + min(n, _PRODUCT // k))
    first = (stride * place * k + offset) % n
    count = min(k, n - place * k)
    number = torch.arange(count, dtype=torch.long, device=device)
    return (number * stride + first).remainder_(n).sort().values
