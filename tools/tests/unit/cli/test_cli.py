"""The command line: what it accepts, what it refuses, and in which words."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from gradsieve_tools.cli import arguments as values
from gradsieve_tools.cli import tree
from gradsieve_tools.cli.main import main, parser_for
from gradsieve_tools.commands.table import COMMANDS


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1", 1),
        ("1000", 1000),
        ("25e6", 25_000_000),
        ("1.5e3", 1500),
        ("123456789012", 123_456_789_012),
        ("1E6", 1_000_000),
        ("124M", 124_000_000),
        ("1.3B", 1_300_000_000),
        ("7b", 7_000_000_000),
        ("0.5k", 500),
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


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    program = "import sys; from gradsieve_tools.cli.main import main; sys.exit(main())"
    words = ["plan", "--world", "4", "--rate", "1gbit", "--params", "1e6", "--compute", "100ms"]
    with subprocess.Popen(
        [sys.executable, "-c", program, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        running.stdout.close()  # before anything is written
        assert running.stderr.read() == ""
    assert running.returncode == 128 + 13


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


IN_A_SHELL = """
eval "$(register-python-argcomplete gradsieve)"
COMP_LINE=$1 COMP_POINT=${#1} COMP_TYPE=9
_python_argcomplete gradsieve
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("gradsieve --v", ["--version"]),
        ("gradsieve b", ["bench"]),
        ("gradsieve bench traffic --sch", ["--schemes"]),
    ],
)
def test_a_shell_is_offered_what_may_follow(line: str, offered: list[str]) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    bash = ["bash", "--norc", "--noprofile", "-c", IN_A_SHELL, "bash", line]
    ended = subprocess.run(
        bash, env=os.environ | {"PATH": path}, capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stdout.split() == offered, ended.stderr


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


def test_a_command_that_loads_torch_is_seen() -> None:
    done = without_torch(["bench", "step", "--help"])
    assert done.returncode == 1
    assert "'torch'" in done.stdout


def test_a_run_prints_a_table_and_writes_its_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "traffic.json"
    arguments = ["--schemes", "topk,exdyna", "--world", "2,4", "--params", "2e4", "--density", "0.1"]
    assert main(["bench", "traffic", *arguments, "--json", str(path)]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].split()[:2] == ["scheme", "world"]
    result = json.loads(path.read_text())
    assert [(row["scheme"], row["world"]) for row in result["rows"]] == [
        ("topk", 2),
        ("exdyna", 2),
        ("topk", 4),
        ("exdyna", 4),
    ]
    assert result["config"] == {
        "schemes": ["topk", "exdyna"],
        "world": [2, 4],
        "model": "transformer",
        "params": 22_264,
        "layers": 102,
        "density": 0.1,
    }
    assert len(out) == 2 + len(result["rows"])
