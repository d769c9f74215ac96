"""What can be had: how to ask for it, what it costs, what hides it, what it needs and what it loses."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import torch

from gradsieve.comm.ops import AllReduce
from gradsieve.pipeline.base import UNIT_CAP_MB
from gradsieve.pipeline.budget import LEAST, MOST_STEPS, needed
from gradsieve.schemes import SCHEMES, make
from gradsieve.schemes.base import Agreed, Scheme
from gradsieve.schemes.spardl import SparDL
from gradsieve.schemes.stripes import SENT, Stripes, cost
from gradsieve_tools.costs import PASS, Cost, Costs
from gradsieve_tools.link_costs import WORD, bits_in, blank, seconds_a_bit
from gradsieve_tools.plan import quality
from gradsieve_tools.plan.quality import Gap

Hidden: TypeAlias = Literal["step", "backward", "not"]  # behind what an exchange goes on
Price: TypeAlias = Callable[[Costs], Cost]  # one exchange, in the group of the cost model

DDP_BUCKET = 25 * 2**20  # bytes, torch's default
AT_ONCE = 2  # collectives that torch's gloo carries at a time: its threads. NCCL's go one by one
# Over memory, besides selecting: processor time of `overhead-25e6-2026-11-15.json` (ours) and
# `step-mlp-1gbit-2026-11-15.json` (torch's hooks, on a CPU; an accelerator casts faster)
PASSES, PASSES_GRADIENTS, PASSES_FP16, PASSES_POWERSGD = 1.1, 2.3, 7.0, 18.0
# Times the gradient that our syncs keep with AdamW: where gradients are exchanged, steps, and steps in turn
# (`memory-2026-11-15.json`, and AdamW's part by `memory-2026-11-19.json`)
KEPT, KEPT_WITH_STEPS, KEPT_IN_TURN = 2.1, 3.1, 4.1
# rank, and side of a matrix in a model of which only the size is known
POWERSGD_RANK, POWERSGD_SIDE = 2, 1024
UNIT_CAPS_MB = (UNIT_CAP_MB, 25.0, 400.0)
BUDGETS = (0.75, 0.15)
# docs/internet.md's advice for several sites: the exchange has all steps of a period
SITES_BITS, SITES_EVERY = 0.09, 3
EVERY = (4, 16)
LOCAL_STEPS = (8, 76)
# their traffic cannot be predicted
UNCONTROLLED = {"hard-threshold": "its count is not controlled: 30 to 70 times its target was seen"}
# Times the step of the defaults that a codec or unit size has to get below to be taken instead
_SURELY = 0.95


@dataclass(frozen=True, slots=True)
class Model:
    parameters: int
    forward: float
    backward: float
    # Computed by the processors that also select and send: in a lab of more hosts than processors a step took
    # as long as forward, backward and exchange one after the other (`plan-lab-2026-11-16.json`)
    on_host: bool = False

    @property
    def compute(self) -> float:
        return self.forward + self.backward

    def units(self, cap_mb: float) -> int:
        return max(1, math.ceil(WORD * self.parameters / (cap_mb * 2**20)))


@dataclass(frozen=True, slots=True)
class Option:
    name: str
    call: str  # the line with which a training gets it
    price: Price = field(repr=False)
    hidden: Hidden
    gap: Gap
    memory: float  # bytes on a rank besides model, gradients and optimizer
    every: int = 1  # steps to an exchange
    overlap: int = 1  # steps behind which an exchange hides
    buckets: int = 1  # buckets behind backward
    refused: str = ""  # reason against recommending it


Step: TypeAlias = Callable[[Option], float]  # seconds of a step with an option


def every_option(model: Model, costs: Costs, density: float, step: Step) -> list[Option]:
    """Return each scheme once, with the codec, unit size and teams whose `step` is shortest."""
    chosen = [_best(list(_of_scheme(name, model, costs.world, density)), step) for name in _SCHEMES]
    budgets = [with_budget(model, costs, bits) for bits in BUDGETS]
    periods = [automatic(model, costs, every) for every in (1, *EVERY)]
    others = [gradients_in_four_bits(model), between_sites(model, costs)]
    return [*_of_torch(model), *_local_steps(model), *budgets, *others, *periods, *chosen]


def named(sync: str, model: Model, costs: Costs, density: float) -> Option:
    """Return one that `gradsieve bench step` measures under this name, with the settings it has there."""
    torchs = dict(zip(["dense", "fp16", "powersgd"], _of_torch(model), strict=True))
    if sync in torchs:
        return torchs[sync]
    if sync == "auto":
        return automatic(model, costs, 1)
    if sync == "noop":
        return no_communication(model)
    if sync == "stripes":
        return _stripes(sync, "", model, Stripes(), quality.UNKNOWN)
    return next(_of_scheme(sync, model, costs.world, density))


def no_communication(model: Model) -> Option:
    return Option("no communication", "", lambda costs: Cost(), "not", quality.UNKNOWN, 0.0)


def dense(model: Model) -> Option:
    n, buckets = model.parameters, model.units(DDP_BUCKET / 2**20)

    def price(costs: Costs) -> Cost:
        return _in_buckets(AllReduce(blank(-(-n // buckets))), buckets, costs)

    return Option("dense (plain DDP)", "plain DDP", price, "backward", quality.NONE, 0.0, buckets=buckets)


def _in_buckets(op: AllReduce, buckets: int, costs: Costs) -> Cost:
    """Price torch's buckets: a few at once share the link and wait for latency together."""
    all_of_them = costs.of_ops([op], ours=False).times(buckets)
    together = buckets - math.ceil(buckets / (1 if costs.host.launch else AT_ONCE))
    return replace(all_of_them, link=all_of_them.link - together * costs.around.sum)


def _of_torch(model: Model) -> Iterator[Option]:
    n, buckets = model.parameters, model.units(DDP_BUCKET / 2**20)
    yield dense(model)

    def fp16(costs: Costs) -> Cost:
        half = AllReduce(blank(-(-n // buckets), torch.float16))
        cast = Cost(computed=PASSES_FP16 * PASS * n / costs.host.memory)
        return _in_buckets(half, buckets, costs) + cast

    def powersgd(costs: Costs) -> Cost:
        side = min(POWERSGD_SIDE, max(1, math.isqrt(n)))
        factors = blank(POWERSGD_RANK * -(-n // side))
        computed = Cost(computed=PASSES_POWERSGD * PASS * n / costs.host.memory)
        sums = [AllReduce(blank(max(1, n // 2000))), *[AllReduce(factors)] * 2]
        return costs.of_ops(sums, ours=False) + computed

    hook = "ddp.register_comm_hook(None, fp16_compress_hook)"
    yield Option("fp16 or bf16 hook", hook, fp16, "backward", quality.FP16, 2.0 * n, buckets=buckets)
    name = f"PowerSGD, rank {POWERSGD_RANK}"
    hook = f"ddp.register_comm_hook(PowerSGDState(None, {POWERSGD_RANK}), powerSGD_hook)"
    yield Option(name, hook, powersgd, "backward", quality.POWERSGD, 1.0 * WORD * n)


def _local_steps(model: Model) -> Iterator[Option]:
    scheme, n, units = make("dense"), model.parameters, model.units(UNIT_CAP_MB)
    for every in LOCAL_STEPS:
        yield Option(
            f"dense, every {every} steps",
            f'gradsieve.attach(ddp, optimizer, scheme="dense", exchange=gradsieve.Steps(every={every}))',
            lambda costs: costs.of_scheme(scheme, n, units, PASSES),
            "step",
            quality.of_local_steps(every),
            KEPT_WITH_STEPS * WORD * n,
            every,
        )


def with_budget(model: Model, costs: Costs, bits: float) -> Option:
    scheme = Stripes().at_bits(bits, costs.world)
    call = f"gradsieve.attach(ddp, optimizer, bits={bits:g})"
    return _stripes(f"stripes, {bits:g} bits", call, model, scheme, quality.of_bits(bits, costs.world))


def gradients_in_four_bits(model: Model) -> Option:
    """Return all of them in every step, bucket by bucket behind backward (ADR 49)."""
    scheme, n, units = Stripes(density=1.0, values="int4"), model.parameters, model.units(UNIT_CAP_MB)
    return Option(
        "gradients, 8 bits",
        "gradsieve.attach(ddp, optimizer, bits=8, exchange=gradsieve.Gradients())",
        lambda costs: costs.of_scheme(scheme, n, units, PASSES_GRADIENTS),
        "backward",
        quality.GRADIENTS_IN_FOUR_BITS,
        KEPT * WORD * n,
        buckets=units,
    )


def between_sites(model: Model, costs: Costs) -> Option:
    fits = with_budget(model, costs, SITES_BITS).price(costs).link <= model.compute
    scheme = Stripes().at_bits(SITES_EVERY * SITES_BITS, costs.world)
    exchange = f"gradsieve.Steps(every={SITES_EVERY}, overlap={SITES_EVERY})"
    call = f"gradsieve.attach(ddp, optimizer, bits={SITES_BITS:g}, exchange={exchange})"
    name = f"{SITES_BITS:g} bits, every {SITES_EVERY} steps"
    option = _stripes(name, call, model, scheme, quality.BETWEEN_SITES)
    refused = "an exchange fits into a step here" if fits else ""
    memory = option.memory + WORD * model.parameters  # what an exchange of several steps reads
    return replace(option, every=SITES_EVERY, overlap=SITES_EVERY, memory=memory, refused=refused)


_ALLOWED = 0.05  # part of a step that is not missed


def automatic(model: Model, costs: Costs, every: int) -> Option:
    """Model what `attach(ddp, optimizer)` chooses: bits as needed or as backward hides, else a period."""
    ask = "" if every == 1 else f", exchange=gradsieve.Steps(every={every})"
    name = "auto" if every == 1 else f"auto, every {every} steps"
    silent = costs.of_scheme(Stripes(density=1e-6), model.parameters, model.units(UNIT_CAP_MB), 0.0).link
    overlap = 1
    if every == 1 and silent > model.backward + _ALLOWED * model.compute:
        every = overlap = min(1 + math.ceil((silent - model.backward) / model.compute), MOST_STEPS)
    hidden = max(0.0, (overlap - 1) * model.compute + model.backward - silent)
    a_bit = seconds_a_bit(costs.carrying, model.parameters) * every
    bits = bits_in(hidden, a_bit, LEAST, needed(costs.world))
    bits = min(bits, LEAST + _coded_in(_ALLOWED * model.compute * every, model, costs) / every)
    scheme = Stripes().at_bits(every * bits, costs.world)
    sent = quality.of_auto(bits, costs.world) if every == 1 else quality.UNKNOWN
    option = _stripes(name, f"gradsieve.attach(ddp, optimizer{ask})", model, scheme, sent)
    return replace(option, every=every, overlap=overlap)


def _coded_in(seconds: float, model: Model, costs: Costs) -> float:
    """Bits of an exchange that are rounded, summed and read in that time, as signs."""
    all_of_them = costs.of_scheme(Stripes(density=1.0), model.parameters, 1, 0.0).computed
    return cost("sign", costs.world) * seconds / max(all_of_them, 1e-12)


def _stripes(name: str, call: str, model: Model, scheme: Stripes, gap: Gap) -> Option:
    n, units = model.parameters, model.units(UNIT_CAP_MB)
    return Option(
        name,
        call,
        lambda costs: costs.of_scheme(scheme, n, units, PASSES),
        "step",
        gap,
        KEPT_IN_TURN * WORD * n,
    )


_SCHEMES = [name for name, kind in SCHEMES.items() if not kind.lossless and kind is not Stripes]


def _of_scheme(name: str, model: Model, world: int, density: float) -> Iterator[Option]:
    """The default first, then all that may be chosen about it."""
    usual = make(name, density)
    for scheme in _settings(usual, world):
        for cap in (math.inf,) if scheme.whole_model else UNIT_CAPS_MB:
            yield _option(name, scheme, cap, model, exact=getattr(scheme, "values", "exact") == "exact")


def _settings(usual: Scheme[Any], world: int) -> Iterator[Scheme[Any]]:
    yield usual
    if isinstance(usual, Agreed):
        yield from (replace(usual, values=values) for values in (*SENT, "int8") if values != "exact")
    if isinstance(usual, SparDL):
        yield from (replace(usual, teams=teams) for teams in range(2, world + 1) if world % teams == 0)


def _option(name: str, scheme: Scheme[Any], cap: float, model: Model, exact: bool) -> Option:
    published = name.endswith("-paper")
    units = 1 if math.isinf(cap) else model.units(cap)
    sent = [f"{field}={value!r}" for field, value in _changed(scheme).items()]
    n = model.parameters
    passes = PASSES_GRADIENTS if published else PASSES
    kind = type(scheme).__name__
    call = f"gradsieve.attach(ddp, optimizer, scheme=gradsieve.schemes.{kind}(density={scheme.density:g}"
    call += "".join(f", {each}" for each in sent) + "))"
    if cap not in (math.inf, UNIT_CAP_MB) and units != model.units(UNIT_CAP_MB):
        sent.append(f"units of {cap:g} MB")
        call += f" on DistributedDataParallel(..., bucket_cap_mb={cap:g})"
    return Option(
        ", ".join([f"{name} {scheme.density:g}", *sent]),
        call,
        lambda costs: costs.of_scheme(scheme, n, units, passes),
        "not" if published else "step",
        quality.of_scheme(name, scheme.density, exact),
        (KEPT if published else KEPT_WITH_STEPS) * WORD * n,
        refused=UNCONTROLLED.get(name, ""),
    )


def _changed(scheme: Scheme[Any]) -> dict[str, Any]:
    """Settings that this module chooses."""
    usual = type(scheme)()
    own = {name: getattr(scheme, name, None) for name in ("values", "teams")}
    return {name: value for name, value in own.items() if value != getattr(usual, name, None)}


def _best(options: list[Option], step: Step) -> Option:
    usual, quickest = options[0], min(options, key=step)
    return quickest if step(quickest) < _SURELY * step(usual) else usual
