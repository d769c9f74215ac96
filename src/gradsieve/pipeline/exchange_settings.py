"""What is exchanged, and what happens around it: `Steps` or `Gradients`.

    steps       backward -> exchange what this rank's steps moved -> the optimizer steps this rank's own model
    gradients   backward -> exchange gradients -> the optimizer steps the model that all ranks share

The first is the default. Its law: what all ranks' steps have moved is in the model they share, or in a
residual. A residual is already in the model of the rank it came from, so that no gradient is computed on a
model which has not learnt from the gradients before it; and the optimizer, whichever it is, sees gradients as
it always did.

The second is what papers describe: error feedback on gradients. Its law: over all ranks, what left the
residuals is what the update brought.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeAlias

from gradsieve.errors import ConfigError
from gradsieve.pipeline.budget import Budget
from gradsieve.schemes import make
from gradsieve.schemes.base import Scheme, Values
from gradsieve.schemes.stripes import Stripes

# Bits of a value, there and back; scales come on top, 3 % at 4 bits.
_GRADIENT_BITS: dict[Values, int] = {"int4": 8, "int8": 16, "bf16": 32, "exact": 64}


@dataclass(frozen=True, kw_only=True)
class _Exchange:
    """Settings of both kinds."""

    small: int = 1024  # tensors below so many elements, and all vectors, go dense; 0: none do

    name: ClassVar[str]

    def __post_init__(self) -> None:
        if self.small < 0:
            raise ConfigError("small is a count: 0 or more")

    def describe(self) -> str:
        """Return what is set, in a few words for a log."""
        changed = [f for f in fields(self) if getattr(self, f.name) != f.default]
        return ", ".join([f"exchange={self.name}", *(f"{f.name}={getattr(self, f.name)}" for f in changed)])


@dataclass(frozen=True, kw_only=True)
class Steps(_Exchange):
    """Every rank's optimizer steps its own model, and what its steps moved is exchanged."""

    # Steps to an exchange: in all of them but the last each rank's optimizer goes on alone. For links on
    # which a round takes long; `bits` still count a step: an exchange has `every` times as many.
    every: int = 1
    # Steps of computing that an exchange hides behind, which then know nothing of it: `every` at most. Above
    # 1 what an exchange reads is copied first, n elements more.
    overlap: int = 1

    name: ClassVar[str] = "steps"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.every < 1:
            raise ConfigError(f"every is a number of steps, from 1 up, not {self.every!r}")
        if not 1 <= self.overlap <= self.every:
            raise ConfigError(
                f"overlap={self.overlap} with every={self.every}: an exchange hides behind steps until the "
                f"next one begins, from 1 to {self.every} of them"
            )


@dataclass(frozen=True, kw_only=True)
class Gradients(_Exchange):
    """Gradients are exchanged before the optimizer sees them, and all ranks take the same step."""

    name: ClassVar[str] = "gradients"
    every: ClassVar[int] = 1
    overlap: ClassVar[int] = 1


Exchange: TypeAlias = Steps | Gradients
PUBLISHED = Gradients(small=0)  # what papers describe: every tensor goes by the scheme


def choose_scheme(
    scheme: str | Scheme[Any] | None, density: float | None, bits: float | None, exchange: Exchange | None
) -> Scheme[Any]:
    """Return what a run asks for: a scheme, at a density or at its own; or stripes, which spend a budget that
    is given or chosen. Of gradients a budget buys all, in as many bits as it has."""
    if exchange is not None and not isinstance(exchange, Steps | Gradients):
        raise ConfigError(
            f"exchange={exchange!r}: give gradsieve.Steps(...) or gradsieve.Gradients(...), or leave it out"
        )
    if bits is not None:
        if scheme is not None or density is not None:
            raise ConfigError("bits= cannot be combined with scheme= or density=: drop one of them")
        if isinstance(exchange, Gradients):
            return Stripes(density=1.0, values=_rounded_to(bits))
        return Stripes()
    if scheme is not None or density is not None or isinstance(exchange, Gradients):
        return make("exdyna" if scheme is None else scheme, density)
    return Stripes()


def _rounded_to(bits: float) -> Values:
    """Return the codec of gradients there and back, all of them in every step. They are not sent in fewer
    bits: an optimizer that adapts to each element does not stand what error feedback adds (ADR 49)."""
    affordable = [values for values, needed in _GRADIENT_BITS.items() if needed <= Budget(bits).bits]
    if not affordable:
        raise ConfigError(
            f"bits={bits:g} with gradsieve.Gradients: gradients need 8, 4 there and 4 back. Drop exchange=: "
            "steps need fewer bits; or give a scheme and a density"
        )
    return affordable[-1]


def choose_exchange(exchange: Exchange | None, scheme: Scheme[Any]) -> Exchange:
    """Return the user's choice, or else steps; gradients if a scheme loses nothing; and the rules of its
    paper if a scheme has published ones."""
    if exchange is not None:
        return exchange
    if scheme.whole_model:
        return PUBLISHED
    return Gradients() if scheme.lossless else Steps()
