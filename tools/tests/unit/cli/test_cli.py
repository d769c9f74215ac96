"""The command line: what it accepts, what it refuses, and in which words."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from gradsieve_tools.bench.exchange import measure as exchange
from gradsieve_tools.bench.step import measure as step
from gradsieve_tools.bench.time_to_accuracy import measure as time_to_accuracy
from gradsieve_tools.cli import arguments as values
from gradsieve_tools.cli import progress_bar, tree
from gradsieve_tools.cli.main import main, parser_for
from gradsieve_tools.commands import values as lab_values
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


def options_of(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Of all sub-commands."""
    for action in parser._actions:
        yield action
        for inner in action.choices.values() if isinstance(action, argparse._SubParsersAction) else ():
            yield from options_of(inner)


def test_every_command_takes_sizes_of_models_as_people_write_them() -> None:
    found = [each for each in options_of(parser_for(None)) if "--params" in each.option_strings]
    assert len(found) >= 5
    assert all(each.type is not None and each.type("1.3B") == 1_300_000_000 for each in found)


def test_lists_are_taken_apart() -> None:
    assert lab_values.worlds("16,2,4,2") == [2, 4, 16]
    assert values.schemes("exdyna,topk,exdyna") == ["exdyna", "topk"]
    assert {"noop", "dense", "topk", "micro", "exdyna"} <= set(values.schemes("all"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--schemes", "topk,nosuch"], "'nosuch'"),
        (["--schemes", ""], "no scheme is called"),
        (["--world", "1"], "2 to 65,536 ranks"),
        (["--world", "2,,4"], "whole number"),
        (["--params", "1.5"], "whole number"),
        (["--density", "lots"], "--density"),
        (["--no-such-option"], "--no-such-option"),
    ],
)
def test_a_wrong_argument_is_named(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "traffic", *arguments])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


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


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--params", "1000"], "the smallest mlp has 4,160 parameters, not 1,000: raise --params"),
        (["--params", "4e4", "--workload", "transformer"], "the smallest transformer has 49,984"),
    ],
)
def test_a_model_that_is_too_small_is_refused_before_there_is_a_network(
    arguments: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("gradsieve_tools.bench.common.in_lab.Lab", None)
    assert main(["bench", "step", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_an_interruption_while_arguments_are_read_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tree.Command, "fill", interrupted)  # where torch is loaded
    code = None
    with contextlib.suppress(KeyboardInterrupt):  # which would end all tests
        code = main(["bench", "step"])
    assert code == 130


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


def test_plot_without_matplotlib_is_refused_before_measuring(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["bench", "traffic", "--plot", str(tmp_path / "x.png")]) == 2
    assert "gradsieve-tools[plot]" in capsys.readouterr().err


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


def test_only_the_branch_that_is_asked_for_is_filled() -> None:
    assert inner_parser(("bench", "traffic"))._option_string_actions.keys() > {"--schemes"}
    other = parser_for(["lab", "run"])
    (branches,) = (each for each in other._actions if isinstance(each, argparse._SubParsersAction))
    assert branches.choices["bench"]._subparsers is None


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


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "bench"),
        (["bench"], "traffic"),
        (["bench", "traffic"], "settled_after"),
        (["bench", "step"], "--rate"),
        (["lab", "run"], "--hosts"),
    ],
)
def test_help_helps(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--help"])
    assert ended.value.code == 0
    assert said in capsys.readouterr().out


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


@pytest.mark.parametrize("name", ["step", "exchange", "time-to-accuracy"])
def test_several_numbers_of_hosts_are_a_table_each_and_rows_of_one_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def rows_of(worker: str, config: dict[str, Any]) -> list[dict[str, Any]]:
        asked.append(config["hosts"])
        half = {"vs_noop_half": [1, 1], "vs_dense_half": [2, 2], "step_ms_all": [1, 1, 1]}
        return [{"sync": "noop", "what": "engine", "step_ms": 1.0, "bytes_sent": 0, **half}]

    for module in (step, exchange, time_to_accuracy):
        monkeypatch.setattr(module, "rows_from_hosts", rows_of)
    curve = time_to_accuracy.Curve("loss", [1, 2, 3], [1.0, 2.0, 3.0], [3.0, 2.0, 1.0])
    runs = [time_to_accuracy.Run("dense", 0, 2.0, curve, 10, 10)]

    def measured(plan: time_to_accuracy.Plan) -> list[time_to_accuracy.Run]:
        asked.append(plan.hosts)
        return runs

    monkeypatch.setattr(time_to_accuracy, "measure", measured)
    path = tmp_path / "x.json"
    assert main(["bench", name, "--hosts", "4,2", "--json", str(path)]) == 0
    result = json.loads(path.read_text())
    assert asked == [row["hosts"] for row in result["rows"]] == result["config"]["hosts"] == [2, 4]
    heads = [line for line in capsys.readouterr().out.splitlines() if line.startswith("hosts")]
    assert len(heads) == 2


def test_a_picture_of_several_numbers_of_hosts_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["step", "--trace"], ["step", "--timeline"], ["time-to-accuracy", "--plot"]):
        assert main(["bench", *arguments, "x", "--hosts", "2,4"]) == 2
        assert "of one number of hosts" in capsys.readouterr().err
    assert main(["bench", "exchange", "--hosts", "2,65"]) == 2
    assert "hosts is 65; a lab has 1 to 64" in capsys.readouterr().err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(progress_bar.time, "monotonic", lambda: now[0])
    return now


def test_plain_lines_come_now_and_then_with_the_time_left(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with progress_bar.progress(100) as advance:
        advance(1, "too soon for a line")
        clock[0] = 19.0
        advance(19, "exdyna")
        clock[0] = 480.0
        advance(5, "topk")
    assert capsys.readouterr().err.splitlines() == [
        " 20%  exdyna; about 80 s left",
        " 25%  topk; about 25 min left",
    ]


def test_start_up_is_not_extrapolated(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    """A minute until the first step is done, as of processes that load torch, then ten a second."""
    with progress_bar.progress(10_000) as advance:
        clock[0] = 60.0
        advance(1, "first")  # 167 hours, if it were
        for _ in range(60):
            clock[0] += 20.0
            advance(100, "a step")
    lines = capsys.readouterr().err.splitlines()
    assert lines[:6] == ["  0%  first"] + [f"  {percent}%  a step" for percent in range(1, 5)] + [
        "  5%  a step; about 32 min left"
    ]
    assert lines[-1] == " 60%  a step; about 13 min left"


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    with progress_bar.progress(100) as advance:
        advance(50, "exdyna, 16 ranks")
    shown = sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert "exdyna, 16 ranks" in shown
    assert "50%" in shown
    assert "left" not in shown
    assert ":--" not in shown


def test_a_bar_shows_a_sound_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(progress_bar.Estimate, "spoken", "about 80 s left")
    monkeypatch.setenv("TERM", "xterm")
    with progress_bar.progress(100) as advance:
        advance(50, "exdyna")
    assert "about 80 s left" in sys.stderr.getvalue()  # type: ignore[attr-defined]
