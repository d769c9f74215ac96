"""What of the reference is made from the code while the site is built (`hooks` in mkdocs.yml): the command
line from its parsers, the schemes from their docstrings and settings."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import itertools
import os
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

WIDTH = "100"
"""Of the help texts."""


def parser() -> argparse.ArgumentParser:
    from gradsieve_tools.cli import main

    return main.parser_for(None)


def commands(of: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Those that do something, in the order of their help."""
    inner = [action for action in of._actions if isinstance(action, argparse._SubParsersAction)]
    if not inner:
        yield of
    for action in inner:
        for each in action.choices.values():
            yield from commands(each)


def every_command() -> str:
    before, os.environ["COLUMNS"] = os.environ.get("COLUMNS"), WIDTH
    try:
        sections = [f"## {each.prog}\n\n```text\n{each.format_help()}```\n" for each in commands(parser())]
    finally:
        if before is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = before
    return "\n".join(sections)


def every_scheme() -> str:
    from gradsieve.schemes import SCHEMES

    return "\n".join(_scheme(name, kind) for name, kind in SCHEMES.items())


def _scheme(name: str, kind: type[Any]) -> str:
    """A heading, what it does in a sentence, and a table of its settings."""
    about = inspect.getdoc(sys.modules[kind.__module__]) or ""
    first = " ".join(about.split("\n\n")[0].split())
    texts = {key: text for each in reversed(kind.__mro__) for key, text in _field_texts(each).items()}
    rows = [
        f"| `{field.name}` | `{field.default!r}` | {texts.get(field.name, '')} |"
        for field in dataclasses.fields(kind)
    ]
    title = f'### {kind.__name__}, "{name}"\n\n{first} [How it works](../algorithms/{_place(name)}).\n'
    return "\n".join([title, "| setting | default | meaning |", "|---|---|---|", *rows, ""])


def _place(name: str) -> str:
    """The section that has a scheme's name as its anchor, or else its page."""
    folder = Path(__file__).parent.parent / "docs" / "algorithms"
    for page in sorted(folder.glob("*.md")):
        if f"{{#{name}}}\n" in page.read_text():
            return f"{page.name}#{name}"
    return f"{name}.md"


def _field_texts(kind: type[Any]) -> dict[str, str]:
    """The comment above each field of a dataclass."""
    if not kind.__module__.startswith("gradsieve"):
        return {}
    text = textwrap.dedent(inspect.getsource(kind))
    lines = text.splitlines()
    (body,) = ast.parse(text).body
    assert isinstance(body, ast.ClassDef)
    texts = {}
    for field in body.body:
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            above = itertools.takewhile(_is_comment, reversed(lines[: field.lineno - 1]))
            words = " ".join(reversed([line.strip().removeprefix("# ") for line in above]))
            if words:
                texts[field.target.id] = words.replace("|", "\\|")
    return texts


def _is_comment(line: str) -> bool:
    return line.strip().startswith("# ")


PLACES: dict[str, tuple[str, Callable[[], str]]] = {
    "reference/cli.md": ("<!-- every command -->", every_command),
    "reference/api.md": ("<!-- every scheme -->", every_scheme),
}
"""Of a page, what is replaced, and by what."""


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """MkDocs calls it for each page."""
    if page.file.src_uri not in PLACES:
        return markdown
    place, text = PLACES[page.file.src_uri]
    return markdown.replace(place, text())
