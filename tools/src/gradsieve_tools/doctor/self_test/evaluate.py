"""Answers of ranks in, findings out: no process, no clock."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from gradsieve.errors import list_ranks
from gradsieve_tools.doctor.self_test.findings import REPORT, Finding, failed, ok, percent

# Share of a copy's bandwidth. Torch's forms of codes of few bits reached 0.004 on a processor, and numba's
# 0.11.
SLOW, SLOW_TORCH = 0.03, 0.001
# By what part a loss may differ where the device has other bits than the CPU. Noise of 2e-7 in gradients, as
# from another order of sums, changed losses by 2e-7, and noise of 1e-3, as from TF32, by 0.003.
TOLERANCE = 0.01
LEAK = 0.1  # share of a model's size, a step
PROMPT = 10.0  # seconds after which a dead rank is named
_SHOWN = 3
_WITHOUT = f'train with `gradsieve.kernels.using("torch")`, without compiled kernels, and {REPORT}'
_GIVEN = f"give one, attach(..., bits=0.75), and {REPORT}"

Said = Mapping[str, Any]


def kernels(said: Said) -> Finding:
    wrong: list[str] = said["wrong"]
    if wrong:
        some = ", ".join(wrong[:_SHOWN])
        found = f"{len(wrong)} of {said['comparisons']} comparisons have other bits: {some}"
        return failed(found, said, _WITHOUT)
    return ok(f"{said['comparisons']} comparisons, all with the bits of the reference")


def bandwidth(said: Said) -> Finding:
    shares = {name: rate / said["copy"] for name, rate in said["kernels"].items()}
    least = {name: SLOW_TORCH if form == "torch" else SLOW for name, form in said["forms"].items()}
    slow = [name for name, share in shares.items() if share < least[name]]
    name = min(slow or shares, key=shares.__getitem__)
    found = f"{name} is the slowest: {percent(shares[name])} of the {said['copy'] / 1e9:.3g} GB/s of a copy"
    return (
        failed(f"too slow: {', '.join(slow[:_SHOWN])}; {found}", said, _WITHOUT) if slow else ok(found, said)
    )


def training(plain: Said, plain_on_cpu: Said, ranks: Sequence[Said], ranks_on_cpu: Sequence[Said]) -> Finding:
    """Ask for the CPU's bits if the device has them without gradsieve too."""
    losses = {"losses": [each["losses"] for each in ranks], "cpu": [each["losses"] for each in ranks_on_cpu]}
    if len({each["digest"] for each in ranks}) > 1:
        return failed("the ranks end with different models", losses)
    steps = len(ranks[0]["losses"])
    if plain == plain_on_cpu:
        others = [rank for rank, (a, b) in enumerate(zip(ranks, ranks_on_cpu, strict=True)) if a != b]
        if others:
            return failed(f"{list_ranks(others)}: other bits than on the CPU in {steps} steps", losses)
        return ok(f"{steps} steps with the bits of the CPU, the same model on both ranks", losses)
    pairs = [
        pair
        for a, b in zip(ranks, ranks_on_cpu, strict=True)
        for pair in zip(a["losses"], b["losses"], strict=True)
    ]
    worst = max((abs(a - b) / b if math.isfinite(a) else math.inf) for a, b in pairs)
    found = f"{steps} steps, losses within {worst:.2g} of the CPU's ({TOLERANCE:g} is allowed)"
    return ok(found, losses) if worst <= TOLERANCE else failed(found, losses)


def sanitizer(ranks: Sequence[Said]) -> Finding:
    return ok(f"{len(ranks[0]['losses'])} steps without a data race in the thread that trains")


def memory(ranks: Sequence[Said], steps: int) -> Finding:
    """A leak is in every stretch of so many steps; what grows in some of them is a pool."""
    model = ranks[0]["model"]
    grown = {name: max(min(each["grown"][name]) for each in ranks) for name in ranks[0]["grown"]}
    words = " and ".join(f"{name} {size / 1e3 / steps:+.1f} kB" for name, size in grown.items())
    found = f"growth a step: {words}; the model has {model / 1e3:.0f} kB"
    figures = {"grown": [each["grown"] for each in ranks]}
    leaks = any(size > LEAK * model * steps for size in grown.values())
    return failed(found, figures) if leaks else ok(found, figures)


def death(survivor: Said) -> Finding:
    named, seconds = survivor["named"], survivor["seconds"]
    if named != [1]:
        return failed(f"rank 1 was killed, and rank 0 blames {list_ranks(named) if named else 'none'}")
    found = f"rank 1 was killed; rank 0 names it after {seconds:.2g} s"
    return ok(found, survivor) if seconds <= PROMPT else failed(found, survivor)


def batch_norm(ranks: Sequence[Said]) -> Finding:
    kind = "SyncBatchNorm" if ranks[0]["sync"] else "BatchNorm and its broadcasts (no SyncBatchNorm here)"
    losses = [loss for each in ranks for loss in each["losses"]]
    if not all(map(math.isfinite, losses)):
        return failed(f"{kind}: a loss is not finite")
    if len({each["buffers"] for each in ranks}) > 1:
        return failed(f"{kind}: the ranks have different statistics")
    return ok(f"{kind}: {len(ranks[0]['losses'])} steps, the same model and statistics")


def budget(ranks: Sequence[Said], steps: int) -> Finding:
    said = ranks[0]
    bits, every = said["bits"], said["every"]
    if any(each["bits"] != bits for each in ranks):
        found = f"the ranks have different budgets: {', '.join(str(each['bits']) for each in ranks)} bits"
        return failed(found, said, _GIVEN)
    if not said["chosen"]:
        return failed(f"no budget was chosen in {steps} steps", said, _GIVEN)
    period = f", every {every} steps" if every > 1 else ""
    took = f"a step takes {1e3 * said['step seconds']:.3g} ms"
    return ok(f"{bits:.2g} bits a parameter and step{period}; {took}", said)
