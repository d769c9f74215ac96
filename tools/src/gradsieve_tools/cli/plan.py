"""`gradsieve plan`: which way to exchange gradients, if any, predicted from a profile."""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from typing import TYPE_CHECKING

from gradsieve.errors import ConfigError

if TYPE_CHECKING:
    from gradsieve_tools.plan.options import Model
    from gradsieve_tools.profiles import Profile

_ASSUMED = (
    "Assumed, without --device and --profile: ranks compute on a CPU that copies 10 GB/s, a tenth or less of "
    "a GPU's."
)
_OVERHEAD = 100e-6  # seconds of a round besides its delay, if not measured
# A round goes there and back: gloo waits until the receiver is ready. At 20 ms one way 40.4 ms were measured.
_WAYS = 2
_FORWARD = 1 / 3  # share of computing, if only the sum is known


def run(args: argparse.Namespace) -> int:
    from gradsieve.types import check_density
    from gradsieve_tools import results
    from gradsieve_tools.plan import view
    from gradsieve_tools.plan.choose import error_bar, make_plan, recommendation
    from gradsieve_tools.plan.predict import costs_of

    check_density(args.density)
    if any(value is not None and value < 0 for value in (args.gap, args.price)):
        raise ConfigError("--gap and --price are 0 or more")
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
    """Return the file's profile, one by hand, or the file's with figures by hand in place of its own."""
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
