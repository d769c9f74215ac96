"""Docstrings are sentences, and what our words mean stands in one glossary."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIBRARY = ROOT / "src" / "gradsieve"
TOOLS = ROOT / "tools" / "src" / "gradsieve_tools"
GLOSSARY = ROOT / "docs" / "glossary.md"

OPENERS = (
    "Of",
    "As",
    "By",
    "In",
    "Where",
    "Also",
    "That",
    "Who",
    "For",
    "With",
    "Without",
    "Among",
    "Behind",
)
PERSONS = re.compile(r"\b(?:whoever|nobody|somebody|everybody|anybody)\b", re.IGNORECASE)
MOST_WORDS = 25


def breaches(package: Path) -> Iterator[tuple[str, str]]:
    """Yield kind and place of each breach in the docstrings and comments of a package."""
    for path in sorted(package.rglob("*.py")):
        text = path.read_text()
        where = path.relative_to(package).as_posix()
        for line, prose in _docstrings(ast.parse(text)):
            if prose.split(maxsplit=1)[0] in OPENERS:
                yield "opener", f"{where}:{line} {prose[:60]!r}"
        for line in _strings_under_assignments(ast.parse(text)):
            yield "string under an assignment", f"{where}:{line}"
        for number, content in enumerate(text.splitlines(), 1):
            if PERSONS.search(content):
                yield "person", f"{where}:{number} {content.strip()[:60]!r}"


def _docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            prose = ast.get_docstring(node)
            if prose:
                yield getattr(node, "lineno", 1), prose


def _strings_under_assignments(tree: ast.Module) -> Iterator[int]:
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for before, here in itertools.pairwise(body) if isinstance(body, list) else ():
            is_text = isinstance(here, ast.Expr) and isinstance(here.value, ast.Constant)
            if is_text and isinstance(before, ast.Assign | ast.AnnAssign):
                yield here.lineno


@pytest.mark.parametrize("package", [LIBRARY, TOOLS], ids=lambda package: package.name)
def test_docstrings_are_sentences_with_a_subject(package: Path) -> None:
    assert list(breaches(package)) == []


def test_each_breach_is_seen(tmp_path: Path) -> None:
    (tmp_path / "planted.py").write_text(
        '"""Of a model."""\n\nHERE = 1\n"""A place."""\n\n\ndef f():\n    """Say what nobody needs."""\n'
    )
    assert {kind for kind, _ in breaches(tmp_path)} == {"opener", "person", "string under an assignment"}


def glossary() -> dict[str, str]:
    """Return each word with its name in the code."""
    return dict(re.findall(r"^\| \*\*([^*]+)\*\*[^|]* \| `(\w+)` \|", GLOSSARY.read_text(), re.MULTILINE))


def test_the_glossary_is_short_and_each_word_is_in_the_code() -> None:
    words = glossary()
    rows = [line for line in GLOSSARY.read_text().splitlines() if line.startswith("| **")]
    assert 0 < len(rows) == len(words) <= MOST_WORDS
    code = "\n".join(path.read_text() for path in LIBRARY.rglob("*.py"))
    assert [name for name in words.values() if not re.search(rf"\b{name}\b", code)] == []
