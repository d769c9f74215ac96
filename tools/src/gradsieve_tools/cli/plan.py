"""`gradsieve plan`: which way to exchange gradients, if any, predicted from a profile."""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from gradsieve.errors import ConfigError
from gradsieve_tools.cli.arguments import MOST_RANKS, describe, drawable, quantity, size
from gradsieve_tools.devices import DEVICES
from gradsieve_tools.quantities import BITS, BYTES_A_SECOND, ELEMENTS_A_SECOND, SECONDS

if TYPE_CHECKING:
    from gradsieve_tools.plan.options import Model
    from gradsieve_tools.profiles import Profile

_DESCRIPTION = """\
Predict the time of a training step for dense (plain DDP), fp16, PowerSGD, every-H-steps and every scheme, and
recommend one, or plain DDP. From a profile that `gradsieve doctor --profile` measured, or from figures by
hand, which also replace those of a profile. Nothing is run.

columns:
  to_loss      speedup over plain DDP to DDP's final loss: the predicted step times the steps
               that were measured on a small transformer; - where nobody measured them
  step_ms      predicted; gradsieve's exchange and DDP's hide behind backward
  of_link      what a step sends over what the link carries during a step without communication
  above        loss above dense's after as many steps, measured on such transformers; never predicted
  money_a_day  for what all ranks send in a day of training, with --price, in the place of the two before
  why_not      the reason against it
with --all also:
  vs_dense     times as fast as plain DDP
  bits         that the busiest rank moves, a parameter and step
  memory_mb    on a rank, besides model, gradients and AdamW
  gap          as `above`, and how well it is known

Differences below 10 % do not count; of such options the one with the smallest loss is recommended.
"""
_EXAMPLES = """\
examples:
  gradsieve plan --profile lab.toml --price 0.09 --json plan.json --plot plan.png
  gradsieve plan --device l40s --world 4 --rate 1gbit --params 30.8e6 --compute 27ms
  gradsieve plan --device cpu --world 16 --rate 1gbit --delay 5ms --params 25e6 --compute 300ms
"""
_ASSUMED = (
    "Assumed, without --device and --profile: ranks compute on a CPU that copies 10 GB/s, a tenth or less of "
    "a GPU's."
)
_OVERHEAD = 100e-6  # seconds of a round besides its delay, if not measured
# A round goes there and back: gloo waits until the receiver is ready. At 20 ms one way 40.4 ms were measured.
_WAYS = 2
_FORWARD = 1 / 3  # share of computing, if only the sum is known


def fill(parser: argparse.ArgumentParser) -> None:
    describe(parser, run, _DESCRIPTION, _EXAMPLES)
    add = parser.add_argument
    add("--profile", type=Path, metavar="FILE", help="what `gradsieve doctor --profile FILE` measured")
    add(
        "--device",
        choices=DEVICES,
        metavar="NAME",
        help=f"what ranks compute on, by its data sheet: {', '.join(DEVICES)} (by hand: cpu)",
    )
    add("--world", type=_world, metavar="N", help="ranks")
    add("--rate", type=quantity(BITS, "1gbit"), metavar="R", help="of a rank's link, e.g. 1gbit")
    add("--delay", type=quantity(SECONDS, "5ms"), metavar="D", help="one way, e.g. 5ms (by hand: 0)")
    add("--params", type=size, metavar="N", help="parameters of the model, e.g. 25e6")
    add("--compute", type=quantity(SECONDS, "300ms"), metavar="T", help="forward and backward, e.g. 300ms")
    add(
        "--memory",
        type=quantity(BYTES_A_SECOND, "10GB/s"),
        metavar="B",
        help="copied (by hand: the device's)",
    )
    add(
        "--selection",
        type=quantity(ELEMENTS_A_SECOND, "500M/s"),
        metavar="E",
        help="elements compared with a threshold (by hand: the device's)",
    )
    add("--density", type=float, default=0.01, metavar="D", help="of schemes that select (default: 0.01)")
    add(
        "--gap",
        type=float,
        metavar="PERCENT",
        help="recommend nothing that ends further above dense's loss after as many steps (default: no limit, "
        "since the steps that are needed to reach it count)",
    )
    add("--all", action="store_true", help="all options and columns, however wide (default: six rows)")
    add("--price", type=float, metavar="X", help="of a GB sent, in any currency")
    add("--json", type=Path, metavar="FILE", help="write the plan there")
    add("--plot", type=Path, metavar="FILE.png", help="draw steps against the rate of the links, PNG or SVG")


def run(args: argparse.Namespace) -> int:
    from gradsieve.types import check_density
    from gradsieve_tools import results
    from gradsieve_tools.plan import view
    from gradsieve_tools.plan.choose import error_bar, make_plan, recommendation
    from gradsieve_tools.plan.predict import costs_of

    check_density(args.density)
    if any(value is not None and value < 0 for value in (args.gap, args.price)):
        raise ConfigError("--gap and --price are 0 or more")
    for path in (args.json, args.plot):
        results.writable(path)
    drawable(args.plot)
    profile = _profile(args)
    model, costs = _model(profile, args), costs_of(profile)
    if args.rate is not None:  # a rate by hand is one that hosts do reach
        costs = replace(costs, host=replace(costs.host, carried=0.0))
    most_above = math.inf if args.gap is None else args.gap
    plan = make_plan(model, costs, args.density, most_above)
    given = view.describe(model, costs)
    if args.profile is None and args.device is None:
        given = f"{_ASSUMED} {given}"
    print(f"{view.paragraph(given)}\n\n{view.text(plan, args.price, args.all)}")
    if args.json is not None:
        config: dict[str, object] = {"given": given, "device": args.device, "errors": error_bar(costs)}
        config |= {"recommendation": recommendation(plan), "density": args.density, "gap": args.gap}
        config |= {"recommended": plan.best.option.name, "plain_ddp": plan.plain, "price": args.price}
        results.write(args.json, config, view.rows(plan, args.price))
    if args.plot is not None:
        view.draw(plan, most_above, args.plot)
    return 0


def _profile(args: argparse.Namespace) -> Profile:
    """Of the file, by hand, or of the file with figures by hand in place of its own."""
    from gradsieve_tools.profiles import by_hand, computing_on, read

    latency = None if args.delay is None else _WAYS * args.delay + _OVERHEAD
    if args.profile is None:
        if args.world is None or args.rate is None:
            raise ConfigError("a plan needs --profile FILE, or --world and --rate by hand")
        profile = by_hand(args.device or "cpu", args.world, args.rate, latency or _OVERHEAD)
    else:
        profile = read(args.profile)
        if args.world is not None:
            profile = replace(profile, world=args.world, pairs=None, ring=None)
        if args.rate is not None:
            profile = replace(profile, bandwidth=args.rate, slowest_bandwidth=args.rate, ring=None)
        if latency is not None:
            profile = replace(profile, latency=latency, slowest_latency=latency, ring=None)
        if args.device is not None:
            profile = computing_on(args.device, profile)
    return replace(
        profile, memory=args.memory or profile.memory, selection=args.selection or profile.selection
    )


def _model(profile: Profile, args: argparse.Namespace) -> Model:
    from gradsieve_tools.plan.options import Model

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
