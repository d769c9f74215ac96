"""The house rules hold, and each of them is seen to fail on a copy of the package with a planted breach."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import pkgutil
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.utils._device import _device_constructors

import gradsieve
from gradsieve.schemes import SCHEMES, base
from policy import rules

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "gradsieve"
LAB = ROOT / "tools" / "src" / "gradsieve_tools"
BOTH = pytest.mark.parametrize("package", [PACKAGE, LAB], ids=["gradsieve", "gradsieve_tools"])

SCHEME_LIMIT, FUNCTION_LIMIT = 249, 60
MOST_PUBLIC = 14
"""Names of `gradsieve` itself."""
MAY_USE_DISTRIBUTED = (
    "attaching.py",
    "hooks.py",
    "torch_names.py",
    "comm/engine.py",
    "frameworks/",
    "parallel/",
    "shards.py",
    "checkpoint/reshard.py",
    "sync.py",
    "moments.py",
)
NO_NUMPY: dict[str, tuple[str, ...]] = {
    "schemes": ("exclusive.py", "exdyna.py", "micro.py"),
    "kernels": ("numba_forms.py", "blocks.py"),  # where blocks begin, never their values
    "wire": ("indices.py", "check.py"),
    "comm": (),
    "pipeline": (),
}
"""Folders on the way of the data, and the files in them that work on the host on purpose (ADR 14)."""


@pytest.fixture
def room(tmp_path: Path) -> Path:
    """A package of its own, of those files of ours in which a breach is planted: they have none otherwise."""
    return tmp_path / "gradsieve"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Both packages, for a rule about how files depend on each other."""
    target = tmp_path / "src" / "gradsieve"
    for package, place in ((PACKAGE, target), (LAB, tmp_path / "src" / "gradsieve_tools")):
        shutil.copytree(package, place, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return target


def plant(package: Path, file: str, text: str) -> None:
    (package / file).parent.mkdir(parents=True, exist_ok=True)
    (package / file).write_text(f"{(PACKAGE / file).read_text()}\n{text}\n")


def test_scheme_files_are_under_two_hundred_and_fifty_lines() -> None:
    assert rules.long_files(PACKAGE / "schemes", SCHEME_LIMIT) == []


@BOTH
def test_no_function_is_over_sixty_lines(package: Path) -> None:
    assert rules.long_functions(package, FUNCTION_LIMIT) == []


def test_only_the_carrier_and_what_drives_a_sync_use_torch_distributed() -> None:
    assert rules.users_of(PACKAGE, "torch.distributed", MAY_USE_DISTRIBUTED) == []
    assert rules.users_of(PACKAGE, "torch.distributed") != [], "the rule looks for something that is there"


def test_only_one_file_uses_private_names_of_torch() -> None:
    assert rules.private_to_torch(PACKAGE, ("torch_names.py",)) == []
    assert rules.private_to_torch(LAB, ()) == []
    assert rules.private_to_torch(PACKAGE, ()) != [], "the rule looks for something that is there"


FILE = "schemes/baselines/topk.py"
PLANTED: list[tuple[Callable[[Path], list[str]], tuple[str, ...]]] = [
    (lambda room: rules.long_files(room, SCHEME_LIMIT), ("# one more line\n" * SCHEME_LIMIT,)),
    (
        lambda room: rules.long_functions(room, FUNCTION_LIMIT),
        ("def f():\n" + "    pass\n" * FUNCTION_LIMIT,),
    ),
    (
        lambda room: rules.private_to_torch(room, ()),
        (
            "from torch._C._distributed_c10d import TCPStore",
            "torch._foreach_norm(layers)",
            "def f(module):\n    return module._get_fsdp_state()._fsdp_param_groups",
            "getattr(parameter, '_post_accumulate_grad_hooks', None)",
        ),
    ),
    (
        lambda room: rules.users_of(room, "torch.distributed"),
        ("from torch import distributed", "import torch\nworld = torch.distributed.get_rank"),
    ),
    (rules.dangerous, ("import pickle", "torch.load('x')", "eval('1')", "run('true', shell=True)")),
    (rules.left_to_default, ("torch.empty(3)", "from torch import empty\nempty(3)", "make = torch.arange")),
    (lambda room: rules.users_of(room, "numpy"), ("from numpy import array",)),
]


@pytest.mark.parametrize(
    ("rule", "breach"), [(rule, breach) for rule, breaches in PLANTED for breach in breaches]
)
def test_a_planted_breach_is_seen(rule: Callable[[Path], list[str]], room: Path, breach: str) -> None:
    plant(room, FILE, "")
    assert rule(room) == []
    plant(room, FILE, breach)
    assert rule(room)
    assert all(each.startswith(FILE) for each in rule(room))


def test_only_one_file_uses_simgrid() -> None:
    assert rules.users_of(PACKAGE, "simgrid") == []
    assert rules.users_of(LAB, "simgrid", ("simulate/simgrid_process.py",)) == []
    assert rules.users_of(LAB, "simgrid") != [], "the rule looks for something that is there"


@BOTH
def test_nothing_in_the_packages_runs_what_it_is_told(package: Path) -> None:
    assert rules.dangerous(package) == []


@BOTH
def test_every_tensor_is_made_in_a_named_type_on_a_named_device(package: Path) -> None:
    assert rules.left_to_default(package) == []


def test_the_rule_knows_every_factory_that_torch_puts_on_the_default_device() -> None:
    named = {factory.__name__.removeprefix("fft_") for factory in _device_constructors()}
    assert named - rules._FACTORIES == set()


@pytest.mark.parametrize("part", NO_NUMPY)
def test_no_numpy_on_the_way_of_the_data(part: str) -> None:
    assert rules.users_of(PACKAGE / part, "numpy", NO_NUMPY[part]) == []


def test_names_are_loaded_from_where_readers_of_types_are_told() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    (told,) = (node for node in tree.body if isinstance(node, ast.If))
    imported = {
        alias.name: str(node.module).removeprefix("gradsieve.")
        for node in told.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    modules = {name for name, where in imported.items() if where == "gradsieve"}
    assert modules == set(gradsieve._MODULES)
    assert {name: imported[name] for name in imported.keys() - modules} == gradsieve._WHERE
    assert len(gradsieve.__all__) <= MOST_PUBLIC
    assert set(gradsieve.__all__) <= set(dir(gradsieve))
    with pytest.raises(AttributeError, match="no attribute 'attatch'"):
        _ = gradsieve.attatch


def test_every_scheme_has_its_page() -> None:
    assert rules.undocumented(list(SCHEMES), ROOT / "docs" / "algorithms") == []


def test_a_scheme_without_its_page_or_section_is_seen(tmp_path: Path) -> None:
    (tmp_path / "one.md").touch()
    (tmp_path / "small.md").write_text(
        "# Small\n\n## two: a section {#two}\n\nthree, [four](#four) {#four}\n"
    )
    missing = ["three has no three.md and no section", "four has no four.md and no section"]
    assert rules.undocumented(["one", "two", "three", "four"], tmp_path) == missing
    (tmp_path / "again.md").write_text("## two, once more {#two}\n")
    assert rules.undocumented(["two"], tmp_path) == ["two has 2 sections"]


def test_every_decision_that_is_cited_can_be_found() -> None:
    folders = [("src", "py"), ("tools/src", "py"), ("tests", "py"), ("scripts", "py"), ("docs", "md")]
    files = [path for folder, kind in folders for path in (ROOT / folder).rglob(f"*.{kind}")]
    cited = {int(number) for path in files for number in re.findall(r"\bADR (\d+)", path.read_text())}
    assert len(cited) > 40
    assert rules.decision_faults(cited, ROOT / "docs" / "adr") == []


def test_decisions_that_cannot_be_found_are_seen(tmp_path: Path) -> None:
    one = "# ADR 1: One {#adr-1}\n\nStatus: accepted (2026-11-15)\n"
    (tmp_path / "one.md").write_text(one + "\n## ADR 2: Two {#adr-2}\n\nNo status.\n")
    (tmp_path / "index.md").write_text("| 1 | [One](one.md#adr-1) | accepted |\n")
    missing = ["ADR 3 is not there", "ADR 2 has no anchor or status", "ADR 2 is not in the index"]
    assert rules.decision_faults({1, 3}, tmp_path) == missing
    (tmp_path / "again.md").write_text(one)
    assert rules.decision_faults({1}, tmp_path)[0] == "ADR 1 is there twice"


def subclasses(kind: type) -> set[type]:
    return {kind for child in kind.__subclasses__() for kind in (child, *subclasses(child))}


def test_every_scheme_of_the_package_is_registered_and_exported() -> None:
    for module in pkgutil.walk_packages(gradsieve.schemes.__path__, "gradsieve.schemes."):
        importlib.import_module(module.name)  # a scheme is imported when somebody asks for it
    ours = {kind for kind in subclasses(base.Scheme) if kind.__module__.startswith("gradsieve.schemes")}
    schemes = {kind for kind in ours if not inspect.isabstract(kind)}
    assert schemes == {kind for kind in SCHEMES.values() if kind.__module__.startswith("gradsieve.schemes.")}
    assert {kind.__name__ for kind in schemes} <= set(gradsieve.schemes.__all__)


@pytest.mark.parametrize("name", [name for name, kind in SCHEMES.items() if not kind.no_comm])
def test_recipe_and_comments_of_a_scheme_name_the_same_steps(name: str) -> None:
    assert rules.recipe_faults(Path(inspect.getfile(SCHEMES[name]))) == []


def test_a_step_missing_from_recipe_or_code_is_seen(tmp_path: Path) -> None:
    file = tmp_path / "toy.py"
    file.write_text('"""Toy.\n\n1. Do.\n2. Undo.\n"""\n# 1.\n# 3. and 4.\n')
    assert [fault.split("step ")[1][0] for fault in rules.recipe_faults(file)] == ["2", "3", "4"]


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    """import-linter over the package under `root`, by the contract in its pyproject.toml."""
    return subprocess.run(
        [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"],
        cwd=root,
        env={**os.environ, "PYTHONPATH": f"{root / 'src'}:{root / 'tools' / 'src'}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_imports_go_down_only() -> None:
    done = lint_imports(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "KEPT" in done.stdout


@pytest.mark.parametrize(
    ("file", "breach", "named"),
    [
        ("types.py", "import gradsieve.schemes.baselines.topk", "types -> gradsieve.schemes.baselines.topk"),
        ("comm/ops.py", "import gradsieve_tools.emulation", "comm.ops -> gradsieve_tools.emulation"),
    ],
)
def test_an_import_that_goes_up_is_seen(copy: Path, file: str, breach: str, named: str) -> None:
    plant(copy, file, breach)
    done = lint_imports(copy.parents[1])
    assert done.returncode == 1, done.stdout + done.stderr
    assert f".{named}" in done.stdout, done.stdout
