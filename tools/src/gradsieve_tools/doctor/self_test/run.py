"""All checks in order, each with its seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gradsieve.errors import ConfigError
from gradsieve_tools.doctor.self_test import evaluate
from gradsieve_tools.doctor.self_test.findings import Finding, failed
from gradsieve_tools.doctor.self_test.pair import Pair, Unanswered

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Sizes:
    # vector lengths, around those of blocks, rows and chunks
    lengths: tuple[int, ...] = (1, 7, 64, 257, 1000, 131_149)
    elements: int = 1 << 23  # elements of timed vectors, at least
    steps: int = 20
    stretches: int = 4
    stretch: int = 50  # steps between two readings of memory
    budget_steps: int = 300


@dataclass(frozen=True, slots=True)
class Report:
    device: Mapping[str, Any]
    findings: list[Finding]
    seconds: float


def examine(device: str, tell: Tell, sizes: Sizes | None = None) -> Report:
    """`device` as torch calls it; empty for the accelerator that is there, or the CPU."""
    begin = time.monotonic()
    with Pair() as pair:
        try:
            [there] = pair.ask("device", ranks=1, device=device)
        except Unanswered as error:
            raise ConfigError(f"no self-test on {device or 'this machine'}: {error}") from None
        checks = _Checks(pair, there["type"], sizes or Sizes())
        findings = []
        for name in CHECKS:
            tell(name)
            findings.append(checks.run(name))
    return Report(there, findings, round(time.monotonic() - begin, 1))


class _Checks:
    def __init__(self, pair: Pair, device: str, sizes: Sizes) -> None:
        self.pair, self.device, self.sizes = pair, device, sizes

    def run(self, name: str) -> Finding:
        begin = time.monotonic()
        try:
            finding = CHECKS[name](self)
        except Unanswered as error:
            finding = failed(str(error))
        return finding.of(name, time.monotonic() - begin)

    def ask(self, what: str, **settings: Any) -> list[Any]:
        return self.pair.ask(what, **{"device": self.device, **settings})

    def kernels(self) -> Finding:
        return evaluate.kernels(*self.ask("kernels", ranks=1, lengths=self.sizes.lengths))

    def bandwidth(self) -> Finding:
        return evaluate.bandwidth(*self.ask("bandwidth", ranks=1, elements=self.sizes.elements))

    def training(self) -> Finding:
        steps = {"steps": self.sizes.steps}
        plain, plain_on_cpu = (
            self.ask("plain", ranks=1, device=on, **steps)[0] for on in (self.device, "cpu")
        )
        on_cpu = self.ask("training", device="cpu", form="torch", **steps)
        return evaluate.training(plain, plain_on_cpu, self.ask("training", **steps), on_cpu)

    def sanitizer(self) -> Finding:
        if self.device != "cuda":
            return Finding("not possible", "torch's sanitizer is CUDA's, and this is no CUDA device")
        with Pair(TORCH_CUDA_SANITIZER="1") as watched:
            return evaluate.sanitizer(watched.ask("training", device=self.device, steps=self.sizes.steps))

    def memory(self) -> Finding:
        stretches, steps = self.sizes.stretches, self.sizes.stretch
        return evaluate.memory(self.ask("memory", stretches=stretches, steps=steps), steps)

    def death(self) -> Finding:
        survivor, _ = self.pair.answers("death", device=self.device)
        self.pair.kill()
        if survivor.error:
            raise Unanswered(f"rank 0: {survivor.error}")
        return evaluate.death(survivor.value)

    def batch_norm(self) -> Finding:
        return evaluate.batch_norm(self.ask("batch norm", steps=self.sizes.steps))

    def budget(self) -> Finding:
        steps = self.sizes.budget_steps
        return evaluate.budget(self.ask("budget", steps=steps), steps)


CHECKS: Mapping[str, Callable[[_Checks], Finding]] = {
    "kernels": _Checks.kernels,
    "bandwidth": _Checks.bandwidth,
    "training": _Checks.training,
    "sanitizer": _Checks.sanitizer,
    "memory": _Checks.memory,
    "batch norm": _Checks.batch_norm,
    "budget": _Checks.budget,
    "killed rank": _Checks.death,  # last: both ranks would have to be started again
}
