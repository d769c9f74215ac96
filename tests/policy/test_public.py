"""What is public: documented, exported, and all that the lab and benches use but for a list with reasons."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from gradsieve.schemes import SCHEMES

ROOT = Path(__file__).parents[2]
PUBLIC = (
    "gradsieve",
    "gradsieve.errors",
    "gradsieve.schemes",
    "gradsieve.testing",
    "gradsieve.frameworks.accelerate",
    "gradsieve.frameworks.lightning",
    "gradsieve.frameworks.trainer",
    "gradsieve.frameworks.torchft",
    "gradsieve.parallel.hsdp",
)
"""Modules. docs/reference/api.md lists them."""
REACHED = {
    "gradsieve.checkpoint.files": "chaos reads back what was acknowledged",
    "gradsieve.comm.engine.Engine": "benches of single collectives run them through the engine itself",
    "gradsieve.comm.ops": "the simulator sends as many messages at once as the engine",
    "gradsieve.comm.rounds": "bench collectives compares the ways in which collectives are carried",
    "gradsieve.comm.sockets": "faults break a rank's own sockets",
    "gradsieve.units": "recorded gradients are laid out as a unit is",
    "gradsieve.recording.Recorder": "benches record virtual ranks, which have no sync",
    "gradsieve.parallel.ddp.DdpSync": "bench step drives the communication hook by itself, to time it",
    "gradsieve.hooks.install_comm_hook": "the same, for torch's own hooks",
    "gradsieve.pipeline.frame.Span": "bench step's timeline is made of the pipeline's spans",
    "gradsieve.torch_names": "torch's names that are not public are in one place",
}
"""What the lab and benches use that no version promises, and why."""
INSIDE = (
    *(
        "baselines",
        "cli",
        "costs.py",
        "link_costs.py",
        "doctor",
        "formulas.py",
        "fuzz/entry_points",
        "plan",
        "profiles.py",
    ),
    "records.py",
)
"""Of the tools, those that know the library from inside: they examine it, read its files, or predict it."""
MOST = 11


def imported(path: Path) -> Iterator[tuple[str, str]]:
    """Module and name, of everything in gradsieve that a file imports by name; of a module, that alone."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and re.match(r"gradsieve(\.|$)", node.module or ""):
            for alias in node.names:
                yield str(node.module), alias.name


def is_module(name: str) -> bool:
    path = ROOT / "src" / Path(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def public_names(module: str) -> set[str]:
    found = importlib.import_module(module)
    return set(getattr(found, "__all__", [name for name in vars(found) if not name.startswith("_")]))


def reached(package: Path) -> set[str]:
    found = set()
    inside = tuple(package / each for each in INSIDE)
    for path in package.rglob("*.py"):
        if any(path.is_relative_to(each) for each in inside):
            continue
        for module, name in imported(path):
            whole = f"{module}.{name}"
            if whole in PUBLIC or module.startswith("gradsieve.testing."):
                continue
            if module in PUBLIC and name in public_names(module):
                continue
            found.add(module if module in REACHED else whole)
    return found


def test_the_lab_uses_what_is_public_and_a_short_list() -> None:
    assert reached(ROOT / "tools" / "src" / "gradsieve_tools") == set(REACHED)
    assert len(REACHED) <= MOST


def shown() -> Iterator[tuple[str, str, str]]:
    """Where the docs, README and examples import something of gradsieve."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.py")]
    for page in pages:
        if "adr" in page.parts:
            continue
        for module, names in re.findall(
            r"^ *from (gradsieve(?:\.\w+)*) import ([\w, ]+)", page.read_text(), re.MULTILINE
        ):
            for name in names.split(","):
                yield page.name, module, name.strip().partition(" as ")[0]


def test_what_the_docs_tell_people_to_import_is_public() -> None:
    every = list(shown())
    assert len(every) > 5
    inside = tuple(f"{module}." for module in PUBLIC[1:])
    assert [each for each in every if each[1] not in PUBLIC and not each[1].startswith(inside)] == []
    for page, module, name in every:
        assert is_module(f"{module}.{name}") or hasattr(importlib.import_module(module), name), (page, name)


def test_the_reference_lists_the_public_modules() -> None:
    text = (ROOT / "docs" / "reference" / "api.md").read_text()
    text = text.split("### Public modules\n")[1].split("\n## ")[0]
    assert [module for module in PUBLIC if f"`{module}`" not in text] == []


@pytest.mark.parametrize("module", ["gradsieve", "gradsieve.schemes", "gradsieve.testing"])
def test_what_is_exported_is_there_and_in_the_docs(module: str) -> None:
    found = importlib.import_module(module)
    text = "\n".join(path.read_text() for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
    assert [name for name in found.__all__ if not hasattr(found, name)] == []
    schemes = {kind.__name__ for kind in SCHEMES.values()}  # their page is made from the registry
    missing = [name for name in found.__all__ if not re.search(rf"\b{name}\b", text)]
    assert set(missing) - schemes == set()
