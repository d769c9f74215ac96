"""What the documentation shows exists: commands parse, files and links are there, messages are ours."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import reference_pages

from documents import PAGES, ROOT, Block, blocks, commands
from gradsieve_tools.cli import main

RUN_HERE = {"plan"}
"""Sub-commands that take no time and no network: these are run, all others are parsed."""
ALL = [(block, words) for page in PAGES for block in blocks(page) for words in commands(block)]


def check(words: list[str], block: Block) -> None:
    """What a user would type does something, as far as that is known without doing it."""
    if words[0] == "gradsieve":
        try:
            known, rest = reference_pages.parser().parse_known_args(words[1:])
        except SystemExit:
            pytest.fail(f"{block}: the parser refuses `{' '.join(words)}`")
        assert not rest, f"{block}: no such options: {rest}"
        # Of `lab run`: what hosts run.
        inner = [word for word in getattr(known, "command", ()) if word != "--"]
        if inner and isinstance(known.command, list) and inner[0] in ("gradsieve", "python", "torchrun"):
            check(inner, block)
    elif words[0] == "just":
        recipes = re.findall(r"^(\S+).*:", (ROOT / "justfile").read_text(), re.MULTILINE)
        assert words[1] in recipes, f"{block}: the justfile has no {words[1]}"
    else:
        scripts = [word for word in words if re.match(r"(examples|benchmarks|scripts)/.*\.py$", word)]
        missing = [script for script in scripts if not (ROOT / script).is_file()]
        assert not missing, f"{block}: {missing}"


@pytest.mark.parametrize(("block", "words"), ALL, ids=[str(block) for block, _ in ALL])
def test_commands_are_those_of_the_command_line(
    block: Block, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(words, block)
    monkeypatch.chdir(tmp_path)  # some write files
    if words[0] == "gradsieve" and words[1] in RUN_HERE and "--profile" not in words:
        assert main.main(words[1:]) == 0


def test_commands_are_found() -> None:
    assert len(ALL) > 50
    assert {words[0] for _, words in ALL} >= {"gradsieve", "torchrun", "python"}


@pytest.mark.parametrize(
    "text", ["gradsieve plann --world 4", "gradsieve plan --wrld 4", "python benchmarks/nowhere.py"]
)
def test_a_command_that_does_not_exist_is_seen(text: str) -> None:
    block = Block(PAGES[0], 1, "sh", "", text, None)
    (words,) = commands(block)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        check(words, block)


def unprintable(text: str) -> list[str]:
    """A character that nobody sees stands where a word was."""
    return [repr(character) for character in text if not character.isprintable() and character != "\n"]


def test_no_word_was_lost_to_a_control_character() -> None:
    assert {page.name: found for page in PAGES if (found := unprintable(page.read_text()))} == {}
    assert unprintable("as in [\x01 12]") == ["'\\x01'"]


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 100


def test_every_error_message_shown_is_in_the_code() -> None:
    known = "\n".join([*_texts(ROOT / "src"), *_texts(ROOT / "tools" / "src")])
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    before_hints = page.split("## No error, but")[0]
    shown = re.findall(r"^\| `([^`]+)`", before_hints, re.MULTILINE)
    assert len(shown) > 30
    assert [text for text in shown if text not in known and not hasattr(_errors(), text)] == []


def _texts(folder: Path) -> list[str]:
    """What strings in the source say, the parts of one that are filled in left out."""
    found: list[str] = []
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "*" for part in node.values]
                found.append("".join(str(part) for part in parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def _errors() -> object:
    from gradsieve import errors

    return errors


def test_every_command_and_scheme_is_in_the_reference() -> None:
    from gradsieve.schemes import SCHEMES

    commands_page, schemes_page = reference_pages.every_command(), reference_pages.every_scheme()
    for name in ("doctor", "plan", "lab run", "bench step", "simulate", "figure", "watch", "report"):
        assert f"## gradsieve {name}\n" in commands_page
    for name, kind in SCHEMES.items():
        assert f'\n### {kind.__name__}, "{name}"\n' in f"\n{schemes_page}"
    untold = re.findall(r"^\| `(\w+)` \| .* \|  \|$", schemes_page, re.MULTILINE)
    assert untold == [], "settings without a docstring"
