"""The picture of the house, docs/images/architecture.svg, from the code: layers of the import contract, and
what each room says of itself.

    python tools/architecture.py
"""

from __future__ import annotations

import ast
import textwrap
from html import escape
from pathlib import Path

import tomllib

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "images" / "architecture.svg"
_WIDTH, _GAP, _LINE, _PAD = 1120, 10, 15, 8
_CHARACTER = 6.4
"""Units that one takes in the small font."""
_STYLE = """
  text { font-family: system-ui, sans-serif; font-size: 12px; fill: #1f2933 }
  .name { font-weight: 600; font-size: 13px }
  .side { fill: #7b8794 }
  rect { fill: #f5f7fa; stroke: #9aa5b1; rx: 5 }
"""


def layers(root: Path) -> list[list[str]]:
    """Rooms from the top to the bottom, modules of one package in a layer as one room."""
    contract = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]
    found = []
    for line in contract["layers"]:
        rooms: dict[str, list[str]] = {}
        for name in (each.strip().removeprefix("gradsieve.") for each in line.split("|")):
            package, _, module = name.partition(".")
            rooms.setdefault(package, []).extend([module] if module else [])
        found.append([f"{room}: {', '.join(parts)}" if parts else room for room, parts in rooms.items()])
    return found


def missing(root: Path) -> list[str]:
    """Rooms of the source that no layer has: a contract that does not see them holds for nothing."""
    known = {room.partition(":")[0] for layer in layers(root) for room in layer}
    inside = (path for path in (root / "src" / "gradsieve").iterdir() if not path.name.startswith("__"))
    here = {path.stem for path in inside if path.suffix == ".py" or path.is_dir()}
    return sorted(here - known)


def says(root: Path, room: str) -> str:
    """The first sentence of its docstring; of a part of a package, those of its modules."""
    package, _, parts = room.partition(": ")
    path = root / "src" / "gradsieve" / package
    modules = [path / f"{part}.py" for part in parts.split(", ")] if parts else [path / "__init__.py"]
    if not path.is_dir():
        modules = [path.with_suffix(".py")]
    return "; ".join(map(_sentence, modules))


def _sentence(module: Path) -> str:
    text = " ".join((ast.get_docstring(ast.parse(module.read_text())) or "").split("\n\n")[0].split())
    return text.partition(". ")[0].rstrip(".:").replace("`", "")


def drawn(root: Path) -> str:
    body, top = [], _GAP
    for layer in layers(root):
        width = (_WIDTH - _GAP * (len(layer) + 1)) / len(layer)
        wrapped = [textwrap.wrap(says(root, room), int((width - 2 * _PAD) / _CHARACTER))
                   for room in layer]  # fmt: skip
        height = 2 * _PAD + _LINE * (1 + max(map(len, wrapped)))
        for place, (room, lines) in enumerate(zip(layer, wrapped, strict=True)):
            left = _GAP + place * (width + _GAP)
            body.append(f'<rect x="{left:.0f}" y="{top}" width="{width:.0f}" height="{height}"/>')
            body.append(_text(left + _PAD, top + _PAD + 11, room, "name"))
            body += [
                _text(left + _PAD, top + _PAD + 11 + _LINE * line, words)
                for line, words in enumerate(lines, start=1)
            ]
        top += height + _GAP
    body.append(_text(_GAP, top + 11, "A room imports only rooms that are drawn below it.", "side"))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {top + 20}" role="img">'
    return "\n".join([head, f"<style>{_STYLE}</style>", *body, "</svg>", ""])


def _text(x: float, y: float, words: str, kind: str = "") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}"{kind and f" class={kind!r}"}>{escape(words)}</text>'


if __name__ == "__main__":
    PICTURE.write_text(drawn(ROOT))
