"""The pages of the documentation, as tests read them: blocks of code, commands, links.

A block that cannot run where tests do has a comment before it that says why: <!-- not run: needs a GPU -->.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
_TOP = ("README", "CONTRIBUTING", "RELEASE")
PAGES = [*(ROOT / f"{name}.md" for name in _TOP), *sorted((ROOT / "docs").rglob("*.md"))]

_FENCE = re.compile(
    r"(?:<!-- not run: (?P<reason>[^>]*) -->\n+)?^(?P<indent> *)```(?P<language>\w*)(?P<title>[^\n]*)\n"
    r"(?P<text>.*?)^(?P=indent)```",
    re.MULTILINE | re.DOTALL,
)
_INDENTED = re.compile(r"(?:^    (?!\s*[-*\d])[^\n]*\n)+", re.MULTILINE)
_STARTS = ("gradsieve", "torchrun", "python", "just")


@dataclass(frozen=True, slots=True)
class Block:
    page: Path
    line: int
    language: str
    title: str
    text: str
    reason: str | None
    """Why it cannot run here."""

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    """Fenced ones, and indented ones of commands."""
    text = page.read_text()
    for found in _FENCE.finditer(text):
        body = re.sub(rf"^{found['indent']}", "", found["text"], flags=re.MULTILINE)
        line = text.count("\n", 0, found.start("text")) + 1
        yield Block(page, line, found["language"], found["title"].strip(), body, found["reason"])
    for found in _INDENTED.finditer(_FENCE.sub(lambda fence: "\n" * fence[0].count("\n"), text)):
        yield Block(page, text.count("\n", 0, found.start()) + 1, "", "", found[0], None)


def commands(block: Block) -> Iterator[list[str]]:
    """Of a block, in words. What is left out (`...`) is not a command to be typed."""
    if block.language not in ("", "sh"):
        return
    for line in re.sub(r"\\\n *", "", block.text).splitlines():
        text = line.strip().removeprefix("$ ")
        if text.split(" ", 1)[0] in _STARTS and "..." not in text:
            yield shlex.split(text, comments=True)


def links(page: Path) -> Iterator[tuple[str, str]]:
    """Files that a page leads to, from where it is, and the place in them."""
    prose = _FENCE.sub("", page.read_text())
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if not re.match(r"[a-z]+:", target):
            file, _, anchor = target.partition("#")
            yield file, anchor
