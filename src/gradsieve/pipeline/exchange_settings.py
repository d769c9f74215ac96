"""What is exchanged, and what happens around it: `Steps` or `Gradients`.

    steps       backward -> exchange what this rank's steps moved -> the optimizer steps this rank's own model
    gradients   backward -> exchange gradients -> the optimizer steps the model that all ranks share

The first is the default. Its law: what all ranks' steps have moved is in the model they share, or in a
residual. A residual is already in the model of the rank it came from, so that no gradient is computed on a
model which has not learnt from the gradients before it; and the optimizer, whichever it is, sees gradients as
it always did.

The second is what papers describe, with the parts that were proposed to make up for its losses. The law of
each of them: over all ranks, what left the memories is what the update brought.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, TypeAlias

from gradsieve.errors import ConfigError
from gradsieve.pipeline.budget import Fixed
from gradsieve.schemes import make
from gradsieve.schemes.agreed import Values
from gradsieve.schemes.base import Scheme
from gradsieve.schemes.baselines.dgc import Dgc
from gradsieve.schemes.settings import with_settings
from gradsieve.schemes.stripes import Stripes

_GRADIENT_BITS: dict[Values, int] = {"int4": 8, "int8": 16, "bf16": 32, "exact": 64}
"""Of a value, there and back; scales come on top, 3 % at 4 bits."""
DETERMINISTIC_BITS = 0.75
"""The budget of a run that is to be the same again and was given none."""


@dataclass(frozen=True, kw_only=True)
class _Exchange:
    """What both kinds have."""

    warm_up: int = 0
    """Exchanges in which the density falls from 1 to its value, evenly on a logarithmic scale."""
    refresh: int = 0
    """Every so many exchanges all of the vector is sent. 0: never."""
    small: int = 1024
    """Tensors below this many elements, and all vectors, go dense. 0: nothing does."""

    name: ClassVar[str]

    def __post_init__(self) -> None:
        if min(self.warm_up, self.refresh, self.small) < 0:
            raise ConfigError("warm_up, refresh and small are counts: 0 or more")

    def density_at(self, step: int, density: float) -> float:
        """Of the exchange after so many."""
        if self.refresh and step % self.refresh == self.refresh - 1:
            return 1.0
        if step < self.warm_up:
            return float(density ** (step / self.warm_up))
        return density

    def describe(self) -> str:
        """What is set, in a few words for a log."""
        changed = [f for f in fields(self) if getattr(self, f.name) != f.default]
        return ", ".join([f"exchange={self.name}", *(f"{f.name}={getattr(self, f.name)}" for f in changed)])


@dataclass(frozen=True, kw_only=True)
class Steps(_Exchange):
    """Every rank's optimizer steps its own model, and what its steps moved is exchanged."""

    every: int = 1
    """Steps to an exchange: in all of them but the last each rank's optimizer goes on alone. For links on
    which a round takes long; `bits` still count a step, so that an exchange has `every` times as many."""
    overlap: int = 1
    """Steps of computing that an exchange hides behind, which then know nothing of it: `every` at most. With
    0 the exchange is over before the next forward; that works behind DistributedDataParallel only. Above 1
    what an exchange reads is copied first, n elements more."""
    preview: float | None = None
    """Part of this rank's residual that its own model already has. None: as much as it has in common with
    the residuals of all ranks, which is measured all the time (`feedback/coherence.py`)."""

    name: ClassVar[str] = "steps"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.preview is not None and not 0.0 <= self.preview <= 1.0:
            raise ConfigError(f"preview is a part, from 0 to 1, not {self.preview!r}")
        if self.every < 1:
            raise ConfigError(f"every is a number of steps, from 1 up, not {self.every!r}")
        if not 0 <= self.overlap <= self.every:
            raise ConfigError(
                f"overlap={self.overlap} with every={self.every}: an exchange hides behind steps until the "
                f"next one begins, from 0 to {self.every} of them"
            )


@dataclass(frozen=True, kw_only=True)
class Gradients(_Exchange):
    """Gradients are exchanged before the optimizer sees them, and all ranks take the same step."""

    momentum: Literal["optimizer", "local", "masked"] = "optimizer"
    """Where SGD's momentum is applied: after the exchange by the optimizer; by each rank before its residual,
    where it is moved for the user; the same, but forgotten where an element was sent (DGC)."""
    memory: Literal["residual", "estimate"] = "residual"
    """What a rank keeps: what it has not sent; or what all ranks believe its gradient to be, so that only the
    difference is sent (EF21)."""
    by_rate: bool = False
    """Residuals are in units of learning rate times gradient: a schedule does not change them."""
    clip: float | None = None
    """Norm to which a rank's gradient is clipped before it is accumulated, over sqrt(P)."""

    name: ClassVar[str] = "gradients"
    every: ClassVar[int] = 1
    overlap: ClassVar[int] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.clip is not None and not self.clip > 0:
            raise ConfigError(f"clip is a norm above 0, not {self.clip!r}")
        if self.by_rate and self.memory == "estimate":
            raise ConfigError("by_rate is for residuals: an estimate has no learning rate in it")


Exchange: TypeAlias = Steps | Gradients


def choose_scheme(
    scheme: str | Scheme[Any] | None, density: float | None, bits: float | None, exchange: Exchange | None
) -> Scheme[Any]:
    """What a run asks for: a scheme, at a density or at its own; or a budget, fixed or found while it runs,
    which is spent by stripes. Of gradients a budget buys all, in as many bits as it has."""
    if exchange is not None and not isinstance(exchange, Steps | Gradients):
        raise ConfigError(
            f"exchange={exchange!r}: give gradsieve.Steps(...) or gradsieve.Gradients(...), or leave it out"
        )
    if bits is not None:
        if scheme is not None or density is not None:
            raise ConfigError(
                "bits= is a budget that follows no density and no other scheme: drop one of them"
            )
        return (
            Stripes(density=1.0, values=_rounded_to(bits)) if isinstance(exchange, Gradients) else Stripes()
        )
    if scheme is not None or density is not None or isinstance(exchange, Gradients):
        return make("exdyna" if scheme is None else scheme, density)
    if exchange is not None and not exchange.overlap:
        raise ConfigError("with overlap=0 nothing hides, which a budget is found by: give bits= or a scheme")
    return Stripes()


def _rounded_to(bits: float) -> Values:
    """How gradients travel there and back, all of them in every step. They are not sent in fewer bits: an
    optimizer that adapts to each element does not stand what error feedback adds to them (ADR 49)."""
    affordable = [values for values, needed in _GRADIENT_BITS.items() if needed <= Fixed(bits).bits]
    if not affordable:
        raise ConfigError(
            f"bits={bits:g} with gradsieve.Gradients: gradients need 8, 4 there and 4 back. Drop exchange=, "
            "since steps stand fewer bits, or give a scheme and a density"
        )
    return affordable[-1]


def choose_exchange(exchange: Exchange | None, scheme: Scheme[Any]) -> Exchange:
    """What is exchanged where the user does not say: steps; gradients where a scheme loses nothing; and as
    its paper says where a scheme has published rules."""
    if exchange is not None:
        return exchange
    if scheme.whole_model:
        return published(scheme)
    return Gradients() if scheme.lossless else Steps()


def published(scheme: Scheme[Any]) -> Gradients:
    """Error feedback on gradients, every tensor sparse; DGC corrects and clips as well."""
    if isinstance(scheme, Dgc):
        return Gradients(momentum="masked", clip=1.0, small=0)
    return Gradients(small=0)


def parse(text: str, scheme: Scheme[Any]) -> Exchange:
    """Settings as text: `default`, `paper`, `steps:preview=1`, `gradients:momentum=masked+by_rate=true`.
    The scheme is named separately, so that `paper` is what is published of the exchange alone."""
    name, colon, settings = text.partition(":")
    kinds: dict[str, Exchange] = {"steps": Steps(), "gradients": Gradients()}
    if name in kinds:
        return with_settings(kinds[name], name, settings) if colon else kinds[name]
    if text == "paper":
        return published(scheme)
    if text == "default":
        return Gradients() if scheme.lossless else Steps()
    raise ConfigError(
        f"there are no exchange settings {text!r}: it is default, paper, or steps or gradients with "
        "settings, such as gradients:momentum=masked+by_rate=true"
    )
