"""`gradsieve plan`: which way to exchange gradients, if any, predicted from a profile."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from gradsieve.errors import ConfigError
from gradsieve.tools.cli.arguments import MOST_RANKS, describe, drawable, quantity, size
from gradsieve.tools.quantities import BITS, BYTES_A_SECOND, ELEMENTS_A_SECOND, SECONDS

if TYPE_CHECKING:
    from gradsieve.tools.plan.options import Model
    from gradsieve.tools.profiles import Profile

_DESCRIPTION = """\
Predict the time of a training step for dense (plain DDP), fp16, PowerSGD, every-H-steps and every scheme, and
recommend one, or plain DDP. From a profile that `gradsieve doctor --profile` measured, or from figures by
hand, which also replace those of a profile. Nothing is run.

columns:
  step_ms      predicted; gradsieve's exchange hides behind forward and backward, DDP's behind backward
  vs_dense     times as fast as plain DDP
  of_link      share of what a rank's link could carry one way
  bits         that the busiest rank moves, a parameter and step
  memory_mb    on a rank, besides model, gradients and optimizer
  money_a_day  for what all ranks send in a day of training, with --price
  gap          loss above dense's, measured on a small transformer; never predicted
  why_not      the reason against it

Differences below 10 % do not count; of such options the one with the smallest gap is recommended.
"""
_EXAMPLES = """\
examples:
  gradsieve plan --profile lab.toml --price 0.09 --json plan.json --plot plan.png
  gradsieve plan --world 16 --rate 1gbit --delay 5ms --params 25e6 --compute 300ms
"""
_OVERHEAD = 100e-6
"""Seconds of a message besides its delay, where nobody measured it."""
_MESSAGE = 20e-6
_FORWARD = 1 / 3
"""Of computing, where only the sum is known."""


def fill(parser: argparse.ArgumentParser) -> None:
    describe(parser, run, _DESCRIPTION, _EXAMPLES)
    add = parser.add_argument
    add("--profile", type=Path, metavar="FILE", help="what `gradsieve doctor --profile FILE` measured")
    add("--world", type=_world, metavar="N", help="ranks")
    add("--rate", type=quantity(BITS, "1gbit"), metavar="R", help="of a rank's link, e.g. 1gbit")
    add("--delay", type=quantity(SECONDS, "5ms"), metavar="D", help="one way, e.g. 5ms (by hand: 0)")
    add("--params", type=size, metavar="N", help="parameters of the model, e.g. 25e6")
    add("--compute", type=quantity(SECONDS, "300ms"), metavar="T", help="forward and backward, e.g. 300ms")
    add("--memory", type=quantity(BYTES_A_SECOND, "10GB/s"), metavar="B", help="copied (by hand: 10GB/s)")
    add(
        "--selection",
        type=quantity(ELEMENTS_A_SECOND, "500M/s"),
        metavar="E",
        help="elements compared with a threshold (by hand: 500M/s)",
    )
    add("--density", type=float, default=0.01, metavar="D", help="of schemes that select (default: 0.01)")
    add(
        "--gap",
        type=float,
        default=5.0,
        metavar="PERCENT",
        help="loss above dense's up to which an option may be recommended (default: 5)",
    )
    add("--price", type=float, metavar="X", help="of a GB sent, in any currency")
    add("--json", type=Path, metavar="FILE", help="write the plan there")
    add("--plot", type=Path, metavar="FILE.png", help="draw steps against the rate of the links, PNG or SVG")


def run(args: argparse.Namespace) -> int:
    from gradsieve.tools import results
    from gradsieve.tools.plan import view
    from gradsieve.tools.plan.choose import ERROR_BAR, make_plan, recommendation
    from gradsieve.tools.plan.predict import costs_of
    from gradsieve.types import check_density

    check_density(args.density)
    if args.gap < 0 or (args.price is not None and args.price < 0):
        raise ConfigError("--gap and --price are 0 or more")
    for path in (args.json, args.plot):
        results.writable(path)
    drawable(args.plot)
    profile = _profile(args)
    model, costs = _model(profile, args), costs_of(profile)
    if args.rate is not None:  # a rate by hand is one that hosts do reach
        costs = replace(costs, host=replace(costs.host, carried=0.0))
    plan = make_plan(model, costs, args.density, args.gap)
    print(f"{view.describe(model, costs)}\n\n{view.text(plan, args.price)}")
    if args.json is not None:
        config: dict[str, object] = {"given": view.describe(model, costs), "errors": ERROR_BAR}
        config |= {"recommendation": recommendation(plan), "density": args.density, "gap": args.gap}
        config |= {"recommended": plan.best.option.name, "plain_ddp": plan.plain, "price": args.price}
        results.write(args.json, config, view.rows(plan, args.price))
    if args.plot is not None:
        view.draw(plan, args.gap, args.plot)
    return 0


def _profile(args: argparse.Namespace) -> Profile:
    """Of the file, by hand, or of the file with figures by hand in place of its own."""
    from gradsieve.tools.profiles import Profile, read

    latency = None if args.delay is None else args.delay + _OVERHEAD
    if args.profile is None:
        if args.world is None or args.rate is None:
            raise ConfigError("a plan needs --profile FILE, or --world and --rate by hand")
        rate, latency = args.rate, latency or _OVERHEAD
        profile = Profile(
            args.world, args.world, latency, rate, _MESSAGE, latency, rate, memory=10e9, selection=500e6
        )
    else:
        profile = read(args.profile)
        if args.world is not None:
            profile = replace(profile, world=args.world, pairs=None, ring=None)
        if args.rate is not None:
            profile = replace(profile, bandwidth=args.rate, slowest_bandwidth=args.rate, ring=None)
        if latency is not None:
            profile = replace(profile, latency=latency, slowest_latency=latency, ring=None)
    return replace(
        profile, memory=args.memory or profile.memory, selection=args.selection or profile.selection
    )


def _model(profile: Profile, args: argparse.Namespace) -> Model:
    from gradsieve.tools.plan.options import Model

    known = profile.model
    parameters = args.params or (known and known.parameters)
    if not parameters:
        raise ConfigError("how large is the model? Give --params, or a profile made with --model")
    if args.compute is not None:
        return Model(parameters, _FORWARD * args.compute, (1 - _FORWARD) * args.compute)
    if known is None or known.forward is None or known.backward is None or args.params:
        raise ConfigError(
            "how long do forward and backward take? Give --compute, or a profile made with "
            "`gradsieve doctor --model MODULE:FACTORY`"
        )
    return Model(parameters, known.forward, known.backward)


def _world(text: str) -> int:
    world = size(text)
    if not 2 <= world <= MOST_RANKS:
        raise argparse.ArgumentTypeError(f"{text!r}: there are 2 to {MOST_RANKS:,} ranks")
    return world
