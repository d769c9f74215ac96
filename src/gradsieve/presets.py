"""Which treatment a run gets when it names none, or asks for a scheme as it was published."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, TypeAlias

from gradsieve.errors import ConfigError
from gradsieve.feedback.treatment import Treatment
from gradsieve.schemes import make
from gradsieve.schemes.base import Scheme
from gradsieve.schemes.dgc import Dgc
from gradsieve.schemes.stripes import Stripes
from gradsieve.settings import with_settings

Preset: TypeAlias = Literal["default", "paper"] | Treatment


def choose_scheme(
    scheme: str | Scheme[Any] | None, density: float | None, bits: float | None, preset: Preset
) -> Scheme[Any]:
    """What a run asks for: a scheme, at a density or at its own; or a budget, fixed or found while it runs,
    which is spent by stripes."""
    steps = preset == "default" or (isinstance(preset, Treatment) and preset.exchange == "steps")
    if bits is not None:
        if scheme is not None or density is not None:
            raise ConfigError(
                "bits= is a budget that follows no density and no other scheme: drop one of them"
            )
        if not steps:
            raise ConfigError("bits= is for exchange='steps': with gradients give a scheme and a density")
        return Stripes()
    if scheme is not None or density is not None:
        return make("exdyna" if scheme is None else scheme, density)
    return Stripes() if steps else make("exdyna")


def choose(preset: Preset, scheme: Scheme[Any], every: int = 1) -> Treatment:
    """With `every` above 1 steps are exchanged whatever the scheme: also a dense one."""
    if every == 1:
        return _choose(preset, scheme)
    if isinstance(preset, Treatment) and preset.every not in (1, every):
        raise ConfigError(f"every={every} given, but the treatment says {preset.every}: drop one")
    return replace(Treatment() if preset == "default" else _choose(preset, scheme), every=every)


def _choose(preset: Preset, scheme: Scheme[Any]) -> Treatment:
    if isinstance(preset, Treatment):
        return preset
    if preset == "paper":
        return published(scheme)
    if preset != "default":
        raise ConfigError(f"there is no preset {preset!r}; there are: default, paper, or give a Treatment")
    return Treatment(exchange="gradients") if scheme.lossless else Treatment()


def published(scheme: Scheme[Any]) -> Treatment:
    """Error feedback on gradients, every tensor sparse; DGC corrects and clips as well."""
    if isinstance(scheme, Dgc):
        return Treatment(exchange="gradients", momentum="masked", clip=1.0, small=0)
    return Treatment(exchange="gradients", small=0)


def parse(text: str, scheme: Scheme[Any]) -> Treatment:
    """A treatment as text: `default`, `paper`, `steps:preview=1`,
    `gradients:momentum=masked+by_rate=true`."""
    name, colon, settings = text.partition(":")
    if name in ("steps", "gradients"):
        plain = Treatment(exchange="steps" if name == "steps" else "gradients")
        return with_settings(plain, name, settings, fixed=["exchange"]) if colon else plain
    if name in ("default", "paper") and not colon:
        return choose(name, scheme)  # type: ignore[arg-type]  # one of the two
    raise ConfigError(
        f"there is no treatment {text!r}: it is default, paper, or steps or gradients with settings, such as "
        "gradients:momentum=masked+by_rate=true"
    )
