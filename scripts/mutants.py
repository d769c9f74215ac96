"""Puts faults into a copy of the source, one at a time, and shows that the named test turns red.

    python scripts/mutants.py             all of scripts/mutants.toml
    python scripts/mutants.py vote tags   those whose name has one of these words
    python scripts/mutants.py --drawn     twenty lines of examples/one_file.py, each changed by chance

The tests are run once without any fault first: one that is red by itself shows nothing. A mutant is killed
where its test fails; an error before that, such as a module that cannot be imported, is none. The exit code
is 1 if a mutant survives, or more than a quarter of those that were drawn. The tree itself is only read.
"""

from __future__ import annotations

import ast
import os
import random
import shutil
import signal
import sys
import tempfile
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import tomllib

ROOT = Path(__file__).parent.parent
LIST = ROOT / "scripts" / "mutants.toml"
_NEEDED = ("src", "tools", "tests", "conftest.py", "pyproject.toml", "examples", "docs")
_SECONDS = 600
_PASSED, _FAILED, _HUNG, _CRASHED = (
    0,
    1,
    -99,
    98,
)  # pytest's exit codes, and two of ours; others are no verdict


@dataclass(frozen=True)
class Changed:
    """A file with a fault in it, and the test that has to notice."""

    name: str
    file: str
    source: str
    test: str


@dataclass(frozen=True)
class Mutant:
    """A fault in the function `patch`, written `module:qualified.name`.

    Its body becomes `instead`, or `text`, which it has once, `becomes` another.
    """

    name: str
    patch: str
    test: str
    instead: str = ""
    text: str = ""
    becomes: str = ""

    def changed(self, root: Path = ROOT) -> Changed:
        """Return the file with the fault. Raises LookupError if there is no such function, text or test."""
        where, _, test = self.test.partition("::")
        found = (root / where).read_text() if (root / where).is_file() else ""
        if f"def {test.partition('[')[0]}(" not in found:
            raise LookupError(f"there is no test {self.test}")
        module, _, name = self.patch.partition(":")
        file = _file_of(module, root)
        lines = (root / file).read_text().splitlines(keepends=True) if file else []
        functions = _named(ast.parse("".join(lines)), name.split("."))
        if len(functions) != 1:
            raise LookupError(f"{self.patch} occurs {len(functions)} times, not once")
        [function] = functions
        first = function.body[0] if self.instead else function
        begin, end = first.lineno - 1, function.end_lineno
        before = "".join(lines[begin:end])
        after = textwrap.indent(self.instead, " " * first.col_offset) + "\n"
        if not self.instead:
            if before.count(self.text) != 1:
                count = before.count(self.text)
                raise LookupError(f"its text occurs {count} times in {self.patch}, not once")
            after = before.replace(self.text, self.becomes)
        return Changed(self.name, file, "".join([*lines[:begin], after, *lines[end:]]), self.test)


def _file_of(module: str, root: Path) -> str:
    """Return the path of a module of either distribution, or nothing."""
    path = module.replace(".", "/")
    files = [f"{top}/{path}{end}" for top in ("src", "tools/src") for end in (".py", "/__init__.py")]
    return next((file for file in files if (root / file).is_file()), "")


def _named(node: ast.AST, names: Sequence[str]) -> list[ast.FunctionDef]:
    """Return the functions of this qualified name, also those that are defined under an `if`."""
    found: list[ast.FunctionDef] = []
    for each in ast.iter_child_nodes(node):
        if not isinstance(each, ast.FunctionDef | ast.ClassDef):
            found += _named(each, names)
        elif each.name == names[0] and names[1:]:
            found += _named(each, names[1:])
        elif each.name == names[0] and isinstance(each, ast.FunctionDef):
            found.append(each)
    return found


def read(path: Path = LIST) -> list[Mutant]:
    return [Mutant(**each) for each in tomllib.loads(path.read_text())["mutant"]]


def faults(mutants: Sequence[Mutant], root: Path = ROOT) -> list[str]:
    """Say what keeps mutants from being applied."""
    names = [mutant.name for mutant in mutants]
    found = [f"{name}: two have this name" for name in sorted(set(names)) if names.count(name) > 1]
    for mutant in mutants:
        try:
            ast.parse(mutant.changed(root).source)
        except (LookupError, SyntaxError) as error:
            found.append(f"{mutant.name}: {error}")
    return found


# What an operator is changed into. A number becomes one more.
_OTHERS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Add, ast.Lt: ast.GtE, ast.Gt: ast.LtE, ast.GtE: ast.Lt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip


def drawn(file: str, test: str, count: int = 20, seed: int = 0) -> list[Changed]:
    """Change one operator or number in each of `count` lines of a file, but not in `main`."""
    text = (ROOT / file).read_text()

    def places(tree: ast.Module) -> list[tuple[int, ast.AST]]:
        inside = [
            node for each in tree.body if getattr(each, "name", "") != "main" for node in ast.walk(each)
        ]
        return [(node.lineno, node) for node in inside if _is_changeable(node)]  # type: ignore[attr-defined]

    numbers = sorted({line for line, _ in places(ast.parse(text))})
    source, mutants = random.Random(seed), []
    for line in sorted(source.sample(numbers, count)):
        tree = ast.parse(text)
        node = source.choice([node for number, node in places(tree) if number == line])
        _change(node)
        mutants.append(Changed(f"line {line}: {ast.unparse(node)}", file, ast.unparse(tree), test))
    return mutants


def _is_changeable(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return type(node.value) in (int, float)
    if isinstance(node, ast.Compare):
        return type(node.ops[0]) in _OTHERS
    return isinstance(node, ast.BinOp) and type(node.op) in _OTHERS


def _change(node: ast.AST) -> None:
    if isinstance(node, ast.Constant):
        node.value += 1  # type: ignore[operator]
    elif isinstance(node, ast.BinOp):
        node.op = _OTHERS[type(node.op)]()  # type: ignore[assignment]
    elif isinstance(node, ast.Compare):
        node.ops = [_OTHERS[type(node.ops[0])]()]  # type: ignore[list-item]


def run_tests(root: Path, tests: Sequence[str]) -> int:
    """Run pytest in a fork of this process, which has loaded what takes longest. Returns an exit code."""
    child = os.fork()
    if not child:
        try:
            os._exit(_tested(root, tests))
        finally:
            os._exit(_CRASHED)
    until = time.monotonic() + _SECONDS
    while time.monotonic() < until:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return _HUNG


def _tested(root: Path, tests: Sequence[str]) -> int:
    os.setpgid(0, 0)
    output = os.open(root / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(root)
    for name in [name for name in sys.modules if name.partition(".")[0] == "gradsieve"]:
        del sys.modules[name]
    sys.path[:0] = [str(root / "src"), str(root / "tools" / "src")]
    sys.dont_write_bytecode = True  # of a mutant, it could be taken for the file put back
    ways = {
        "PYTHONPATH": f"{root / 'src'}:{root / 'tools' / 'src'}",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "ANY_ORDER_EXAMPLES": "300",  # many enough for a state machine to come by each of the faults
    }
    os.environ |= ways
    return int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests]))


def try_out(mutant: Changed, root: Path) -> str:
    """Put the fault into a copy of the tree, and return what the test says of it."""
    path = root / mutant.file
    before = path.read_text()
    path.write_text(mutant.source)
    code = run_tests(root, [mutant.test])
    path.write_text(before)
    if code in (_FAILED, _HUNG):
        return "killed" if code == _FAILED else "killed (the test hangs)"
    return "SURVIVED" if code == _PASSED else f"NO VERDICT (pytest ended with {code})"


def copy_tree(to: Path) -> None:
    for name in _NEEDED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, to / name)  # with its __pycache__, where numba keeps compiled kernels
        else:
            shutil.copy(source, to / name)


def main(words: Sequence[str]) -> int:
    if list(words) == ["--drawn"]:
        mutants = drawn("examples/one_file.py", "tests/multiproc/test_one_file.py")
        return show(mutants, least=len(mutants) * 3 // 4)
    mutants = [each for each in read() if not words or any(word in each.name for word in words)]
    if problems := faults(mutants) or [f"no mutant has any of {list(words)} in its name"] * (not mutants):
        print("\n".join(problems), file=sys.stderr)
        return 2
    return show([mutant.changed() for mutant in mutants], least=len(mutants))


def show(mutants: Sequence[Changed], least: int) -> int:
    """Try them out, and print a table. 1 if fewer than `least` are killed."""
    import hypothesis  # noqa: F401  # these two before the forks, and not for the gate's look at the list
    import numba  # noqa: F401

    from gradsieve_tools.cli.progress_bar import progress

    killed = 0
    with tempfile.TemporaryDirectory(prefix="gradsieve-mutants-") as folder, progress(len(mutants) + 1) as on:
        root = Path(folder)
        copy_tree(root)
        if run_tests(root, sorted({mutant.test for mutant in mutants})) != _PASSED:
            print((root / "output").read_text()[-4000:], file=sys.stderr)
            print("tests are red without any mutant", file=sys.stderr)
            return 2
        on(1, "the tests themselves")
        print("| mutant | test | result | seconds |\n|---|---|---|---|", flush=True)
        for mutant in mutants:
            start = time.monotonic()
            said = try_out(mutant, root)
            killed += said.startswith("killed")
            print(
                f"| {mutant.name} | `{mutant.test}` | {said} | {time.monotonic() - start:.1f} |", flush=True
            )
            on(1, mutant.name)
    print(f"\n{killed} of {len(mutants)} killed")
    return 0 if killed >= least else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
