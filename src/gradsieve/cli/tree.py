"""All commands, each with its line of help, and the module that knows the rest of it.

A module is loaded when the command line asks for its command: most of them reach torch, which takes a second
or two, and help should not. A module has `fill(parser)`, which adds description, arguments and what to call.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Command:
    summary: str
    module: str = ""
    """In gradsieve.cli; of a command that has others in it, nothing."""
    inner: Mapping[str, Command] = field(default_factory=dict)

    def fill(self, parser: argparse.ArgumentParser) -> None:
        importlib.import_module(f"gradsieve.cli.{self.module}").fill(parser)


_LAB = {
    "run": Command("run a command on every host", "lab.run"),
    "draw": Command("a picture of a network file", "lab.draw"),
    "kill-matrix": Command(
        "let ranks die and stall at every op of a step, and judge the survivors", "lab.kill_matrix"
    ),
    "fuzz": Command("altered messages at every place where a peer's bytes are read", "lab.fuzz"),
    "chaos": Command(
        "train through a seeded schedule of faults of every kind, and judge all ranks", "lab.chaos"
    ),
    "spot": Command("train under torchrun on nodes that are killed, given notice and replaced", "lab.spot"),
    "soak": Command("train for thousands of steps and see whether memory, files or threads grow", "lab.soak"),
}
_BENCH = {
    "step": Command("seconds a training step takes, on a lab network", "bench.step"),
    "step-plot": Command("step time against link rate, from the results of bench step", "bench.step_plot"),
    "overhead": Command(
        "arithmetic of a step over a bare add_ and zero_, on virtual ranks", "bench.overhead"
    ),
    "exchange": Command(
        "collectives through the engine against bare gloo, on a lab network", "bench.exchange"
    ),
    "hsdp": Command("sharded inside hosts, sparse between them, on a lab network", "bench.hsdp"),
    "plan": Command("predictions of `gradsieve plan` against a lab network", "bench.plan"),
    "collectives": Command(
        "collectives by messages of our own against gloo's, on a lab network", "bench.collectives"
    ),
    "time-to-accuracy": Command(
        "seconds to the accuracy or loss that dense ends with, on a lab network", "bench.time_to_accuracy"
    ),
    "traffic": Command("words moved as the number of ranks grows, on virtual ranks", "bench.traffic"),
    "schemes": Command(
        "words and quality of every scheme on recorded gradients, on virtual ranks", "bench.schemes"
    ),
    "bits": Command("what an exchange tells for its bits, beside the limit, on virtual ranks", "bench.bits"),
    "memory": Command("memory that a sync adds to a rank, on real ranks", "bench.memory"),
    "lost": Command("gradient that a scheme loses, to the last bit, on virtual ranks", "bench.lost"),
    "accuracy": Command("final accuracy of whole trainings, on virtual ranks", "bench.accuracy"),
    "resize": Command("trainings that change their number of ranks, on virtual ranks", "bench.resize"),
    "elastic": Command("a training inside torchft whose replicas are killed and stopped", "bench.elastic"),
}
COMMANDS = {
    "doctor": Command("is this cluster set up well: interfaces, links, hosts; with the mend", "doctor"),
    "plan": Command("which way to exchange gradients, if any: predicted steps, ranked, with reasons", "plan"),
    "lab": Command("a real multi-host network on one Linux machine", inner=_LAB),
    "bench": Command("measure schemes against dense and against the limit", inner=_BENCH),
    "simulate": Command(
        "a step at up to thousands of ranks on a simulated network: star, fat tree, torus, two clouds",
        "simulate",
    ),
    "figure": Command("draw the papers' figures", "figure"),
    "watch": Command("a running job, live, from its records", "watch"),
    "report": Command("one HTML page of what was recorded", "report"),
}


def grow(
    parser: argparse.ArgumentParser, commands: Mapping[str, Command], words: Sequence[str] | None
) -> None:
    """All commands by name; but for the one that `words` ask for, without arguments; None asks for all."""
    asked = next((word for word in words or () if not word.startswith("-")), None)
    branches = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, command in commands.items():
        branch = branches.add_parser(name, help=command.summary)
        if words is not None and name != asked:
            continue
        if command.inner:
            grow(branch, command.inner, None if words is None else words[words.index(name) + 1 :])
        else:
            command.fill(branch)
