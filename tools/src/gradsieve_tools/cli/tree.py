"""How a command is declared, and how parsers are made of that: only for the command that is asked for."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradsieve_tools.cli.arguments import describe, drawable
from gradsieve_tools.results import writable


@dataclass(frozen=True, slots=True)
class Option:
    names: Sequence[str]
    settings: Mapping[
        str, Any
    ]  # of `add_argument`; `choices` may be `module:NAME`, loaded when they are needed
    is_written: bool = False
    is_picture: bool = False

    def add(self, parser: argparse.ArgumentParser) -> None:
        settings = dict(self.settings)
        if isinstance(settings.get("choices"), str):
            settings["choices"] = tuple(_loaded(settings["choices"]))
        parser.add_argument(*self.names, **settings)

    def value(self, args: argparse.Namespace) -> Any:
        return getattr(args, self.names[-1].lstrip("-").replace("-", "_"))


def option(
    names: str,
    help: str,  # noqa: A002  # as argparse calls it
    metavar: str | None = None,
    type: Callable[[str], Any] | None = None,  # noqa: A002
    default: Any = None,
    **more: Any,
) -> Option:
    """An option or, without a dash, an argument. Its help ends with its default."""
    if default not in (None, []) and "default" not in help:
        help = f"{help} (default: %(default)s)"  # noqa: A001
    given = {"help": help, "metavar": metavar, "type": type, "default": default, **more}
    return Option(names.split(), {key: value for key, value in given.items() if value is not None})


def flag(name: str, help: str) -> Option:  # noqa: A002
    return Option([name], {"help": help, "action": "store_true"})


def output(
    names: str,
    help: str,  # noqa: A002
    metavar: str = "FILE",
    is_picture: bool = False,
    **more: Any,
) -> Option:
    """Return an option for a file that is written at the end; checked for that before the command runs."""
    settings = {"help": help, "metavar": metavar, "type": Path, **more}
    return Option(names.split(), settings, is_written=True, is_picture=is_picture)


def picture(names: str, help: str, **more: Any) -> Option:  # noqa: A002
    """Return an output that matplotlib draws."""
    return output(names, help, "FILE.png", is_picture=True, **more)


class Command:
    def __init__(
        self,
        summary: str,
        about: str = "",
        examples: str = "",
        run: str = "",
        *options: Option,
        inner: Mapping[str, Command] | None = None,
    ) -> None:
        """Set `run`, as `module:function`, or `inner` commands."""
        self.summary, self.about, self.examples = summary, about, examples
        self.run, self.options, self.inner = run, options, inner or {}

    def fill(self, parser: argparse.ArgumentParser) -> None:
        for each in self.options:
            each.add(parser)
        examples = "".join(f"\n  {line}" for line in self.examples.splitlines())
        describe(parser, self._call, self.about, f"examples:{examples}\n")

    def _call(self, args: argparse.Namespace) -> int:
        for each in self.options:
            if each.is_picture:
                drawable(each.value(args))
        for each in self.options:
            if each.is_written:
                writable(each.value(args))
        code: int = _loaded(self.run)(args)
        return code


def _loaded(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def grow(
    parser: argparse.ArgumentParser, commands: Mapping[str, Command], words: Sequence[str] | None
) -> None:
    """Add all commands by name, but options only for the one in `words`; None: for all."""
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
