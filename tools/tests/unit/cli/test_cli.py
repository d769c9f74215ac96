"""The command line: what it accepts, what it refuses, and in which words."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping

import pytest

from gradsieve_tools.cli import arguments as values
from gradsieve_tools.cli import tree
from gradsieve_tools.cli.main import main, parser_for
from gradsieve_tools.commands.table import COMMANDS


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1", 1),
        ("25e6", 25_000_000),
        ("124M", 124_000_000),
        ("1.3B", 1_300_000_000),
        ("1T", 10**12),
    ],
)
def test_sizes_are_exact(text: str, number: int) -> None:
    found = values.size(text)
    assert found == number
    assert type(found) is int


@pytest.mark.parametrize(
    "text",
    [
        *("1.5", "0", "-3", "1e-3", "nan", "inf", "", "ten", "1e13", "1e999999999", "2,4", "M", "2T"),
        *("1.3BB", "1.3G", "1.2345k", "-1M", "nanM", "1e999999999B"),
    ],
)
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"such as 1000, 25e6, 124M or 1\.3B"):
        values.size(text)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--density", "0"], "density must be above 0"),
        (["--density", "nan"], "density must be above 0"),
        (["--json", "/no/such/folder/x.json"], "/no/such/folder"),
        (["--world", "65536", "--params", "1e12"], "GiB"),
    ],
)
def test_a_setting_that_cannot_work_ends_with_2_and_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "traffic", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.startswith("gradsieve: ")
    assert error.count("\n") == 1


def paths(commands: Mapping[str, tree.Command], *above: str) -> Iterator[tuple[str, ...]]:
    for name, command in commands.items():
        yield from paths(command.inner, *above, name) if command.inner else [(*above, name)]


@pytest.mark.parametrize("path", list(paths(COMMANDS)), ids=" ".join)
def test_every_command_is_described_and_calls_something(
    path: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*path, "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: gradsieve {' '.join(path)} [")
    assert "\nexample" in shown
    assert callable(inner_parser(path).get_default("call"))


def inner_parser(path: tuple[str, ...]) -> argparse.ArgumentParser:
    return below(parser_for(path), path)


def below(parser: argparse.ArgumentParser, path: tuple[str, ...]) -> argparse.ArgumentParser:
    for name in path:
        (branches,) = (each for each in parser._actions if isinstance(each, argparse._SubParsersAction))
        parser = branches.choices[name]
    return parser


WITHOUT_TORCH = """
import contextlib, io, json, sys
from gradsieve_tools.cli.main import main
for words in json.loads(sys.argv[1]):
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
        main(words)
    heavy = [name for name in ("torch", "numpy", "matplotlib", "rich") if name in sys.modules]
    print(words, heavy)
    if heavy:
        sys.exit(1)
"""


def without_torch(*commands: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, json.dumps(commands)],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


def test_help_and_what_needs_no_torch_do_not_load_it() -> None:
    done = without_torch(
        ["--help"],
        ["--version"],
        ["bench", "--help"],
        ["lab", "--help"],
        ["lab", "run", "--help"],
        ["lab", "draw", "--help"],
        ["figure", "--list"],
    )
    assert done.returncode == 0, done.stdout + done.stderr
