"""Which scheme and treatment a run gets when it names none, or asks for a scheme as it was published."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, Literal, TypeAlias

from gradsieve.errors import ConfigError
from gradsieve.pipeline.treatment import Treatment
from gradsieve.schemes import SCHEMES, make
from gradsieve.schemes.base import Scheme
from gradsieve.schemes.baselines.dgc import Dgc
from gradsieve.schemes.oktopk_parts import Regional
from gradsieve.schemes.settings import with_settings
from gradsieve.schemes.stripes import Stripes

Preset: TypeAlias = Literal["default", "paper"] | Treatment

PUBLISHED = {
    SCHEMES[name.removesuffix("-paper")]: kind for name, kind in SCHEMES.items() if name.endswith("-paper")
}
"""Of schemes with rules of our own, those with the published ones. All others have one set of rules."""


def choose_scheme(
    scheme: str | Scheme[Any] | None, density: float | None, bits: float | None, preset: Preset
) -> Scheme[Any]:
    """What a run asks for: a scheme, at a density or at its own, by the published rules with `paper`; or a
    budget, fixed or found while it runs, which is spent by stripes."""
    steps = preset == "default" or (isinstance(preset, Treatment) and preset.exchange == "steps")
    if bits is not None:
        if scheme is not None or density is not None:
            raise ConfigError(
                "bits= is a budget that follows no density and no other scheme: drop one of them"
            )
        if not steps:
            raise ConfigError("bits= is for exchange='steps': with gradients give a scheme and a density")
        return Stripes()
    if scheme is None and density is None and isinstance(preset, Treatment) and not preset.late:
        raise ConfigError("with late=False nothing hides, which a budget is found by: give bits= or a scheme")
    if scheme is None and density is None and steps:
        return Stripes()
    chosen = make("exdyna" if scheme is None else scheme, density)
    return as_published(chosen) if preset == "paper" else chosen


def as_published(scheme: Scheme[Any]) -> Scheme[Any]:
    """The published rules of this scheme, with the settings that were changed."""
    kind = PUBLISHED.get(type(scheme))
    if kind is None:
        return scheme
    changed = {
        f.name: getattr(scheme, f.name) for f in fields(scheme) if getattr(scheme, f.name) != f.default
    }
    unknown = changed.keys() - {f.name for f in fields(kind)}
    if unknown:
        raise ConfigError(
            f"{', '.join(sorted(unknown))}: not a setting of the published {type(scheme).__name__}; "
            f"use gradsieve.{kind.__name__}, or another preset"
        )
    return kind(**changed)


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
    """Error feedback on gradients, every tensor sparse; DGC corrects and clips as well, Ok-Topk has the
    learning rate in its residuals."""
    if isinstance(scheme, Dgc):
        return Treatment(exchange="gradients", momentum="masked", clip=1.0, small=0)
    return Treatment(exchange="gradients", small=0, by_rate=isinstance(scheme, Regional))


def parse(text: str, scheme: Scheme[Any]) -> Treatment:
    """A treatment as text: `default`, `paper`, `steps:preview=1`, `gradients:momentum=masked+by_rate=true`.
    Schemes are named beside it, so that `paper` is the treatment alone."""
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
