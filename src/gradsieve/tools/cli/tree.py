"""All commands, each with its line of help, and the module that knows the rest of it.

A module is loaded when the command line asks for its command: most of them reach torch, which takes a second
or two, and help should not. A module has `fill(parser)`, which adds description, arguments and what to call.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points


@dataclass(frozen=True, slots=True)
class Command:
    summary: str
    module: str = ""
    """Its full name; of a command that has others in it, nothing."""
    inner: Mapping[str, Command] = field(default_factory=dict)

    def fill(self, parser: argparse.ArgumentParser) -> None:
        importlib.import_module(self.module).fill(parser)


_HERE = "gradsieve.tools.cli"
_OWN = {
    "doctor": Command(
        "is this cluster set up well: interfaces, links, hosts; with the fix", f"{_HERE}.doctor"
    ),
    "plan": Command(
        "which way to exchange gradients, if any: predicted steps, ranked, with reasons", f"{_HERE}.plan"
    ),
    "watch": Command("a running job, live, from its records", f"{_HERE}.watch"),
    "report": Command("one HTML page of what was recorded", f"{_HERE}.report"),
}
GROUP = "gradsieve.commands"
"""Of entry points: a package that has some adds commands of these names, each a `Command`."""
IN_LAB = ("lab", "bench", "simulate", "figure")


def commands() -> dict[str, Command]:
    """Our own, and those of packages that are installed next to this one."""
    added = {entry.name: entry for entry in entry_points(group=GROUP)}
    return {**_OWN, **{name: added[name].load() for name in sorted(added)}}


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
