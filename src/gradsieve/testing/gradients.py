"""Gradients that schemes have to live with are drawn from a seed, by `KINDS[kind](generator, n)` in float64.

Those in `EXACT` are small integers times one power of two: no order of adding them up rounds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

# The smallest denormal float32.
_SMALLEST = 2.0**-149


def _uniform(source: Generator, n: int) -> Tensor:
    return torch.rand(n, generator=source, dtype=torch.float32, device="cpu")


def _integers(source: Generator, n: int) -> Tensor:
    return torch.randint(-8, 9, (n,), generator=source, dtype=torch.float64, device="cpu")


def _sparse_integers(source: Generator, n: int) -> Tensor:
    return _integers(source, n) * (_uniform(source, n) < 0.1)


def _zeros(source: Generator, n: int) -> Tensor:
    return torch.zeros(n, dtype=torch.float64, device="cpu")


def _negative_zeros(source: Generator, n: int) -> Tensor:
    return torch.where(_uniform(source, n) < 0.5, -0.0, _integers(source, n))


def _constant(source: Generator, n: int) -> Tensor:
    return torch.full((n,), 3.0, dtype=torch.float64, device="cpu")


def _two_valued(source: Generator, n: int) -> Tensor:
    return torch.where(_uniform(source, n) < 0.5, -1.0, 2.0).double()


def _denormal(source: Generator, n: int) -> Tensor:
    return _integers(source, n) * _SMALLEST


def _sometimes_silent(source: Generator, n: int) -> Tensor:
    """Gives some ranks nothing at all in some steps."""
    return _integers(source, n) * float(_uniform(source, 1) < 0.4)


def _one_place(source: Generator, n: int) -> Tensor:
    """Puts all mass into the last sixteenth."""
    return _integers(source, n) * (torch.arange(n, dtype=torch.int64, device="cpu") >= n - max(1, n // 16))


def _normal(source: Generator, n: int) -> Tensor:
    return torch.randn(n, generator=source, dtype=torch.float64, device="cpu")


def _skewed(source: Generator, n: int) -> Tensor:
    return _normal(source, n) * torch.exp(8 * torch.linspace(0, -1, n, dtype=torch.float64, device="cpu"))


def _huge_range(source: Generator, n: int) -> Tensor:
    power = torch.rand(n, generator=source, dtype=torch.float64, device="cpu") * 72 - 37
    return _normal(source, n).sign() * 10.0**power


KINDS: dict[str, Callable[[Generator, int], Tensor]] = {
    "integers": _integers,
    "sparse integers": _sparse_integers,
    "zeros": _zeros,
    "negative zeros": _negative_zeros,
    "constant": _constant,
    "two-valued": _two_valued,
    "denormal": _denormal,
    "sometimes silent": _sometimes_silent,
    "one place": _one_place,
    "normal": _normal,
    "skewed": _skewed,
    "huge range": _huge_range,
}
EXACT = [kind for kind in KINDS if kind not in ("normal", "skewed", "huge range")]


@dataclass(frozen=True)
class Source:
    """A source gives the same gradients again for the same (step, rank, bucket)."""

    kind: str
    sizes: tuple[int, ...]
    seed: int = 0
    dtype: torch.dtype = torch.float32

    def __call__(self, step: int, rank: int, bucket: int) -> Tensor:
        source = Generator().manual_seed(((self.seed * 1009 + step) * 1009 + rank) * 1009 + bucket)
        return KINDS[self.kind](source, self.sizes[bucket]).to(self.dtype)

    @property
    def exact(self) -> bool:
        return self.kind in EXACT
