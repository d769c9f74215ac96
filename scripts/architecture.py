"""The picture of the house, docs/images/architecture.svg, from the code: layers of the import contract, and
what each room says of itself.

    python scripts/architecture.py
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator, Mapping, Set
from html import escape
from pathlib import Path

import tomllib

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "images" / "architecture.svg"
PACKAGES = {"gradsieve": "src", "gradsieve_tools": "tools/src"}
_WIDTH, _GAP, _LINE, _PAD = 1120, 10, 15, 8
_CHARACTER = 6.4
"""Units that one takes in the small font."""
_STYLE = """
  text { font-family: system-ui, sans-serif; font-size: 12px; fill: #1f2933 }
  .name { font-weight: 600; font-size: 13px }
  .side { fill: #7b8794 }
  rect { fill: #f5f7fa; stroke: #9aa5b1; rx: 5 }
  rect.tools { fill: #fff8e6 }
"""


def layers(root: Path) -> list[list[str]]:
    """Rooms from the top to the bottom."""
    contract = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]
    return [
        [each.strip().removeprefix("gradsieve.") for each in line.split("|")] for line in contract["layers"]
    ]


def missing(root: Path) -> list[str]:
    """Rooms of the source that no layer has: a contract that does not see them holds for nothing."""
    known = {room for layer in layers(root) for room in layer}
    inside = (path for path in (root / "src" / "gradsieve").iterdir() if not path.name.startswith("__"))
    here = {path.stem for path in inside if path.suffix == ".py" or path.is_dir()}
    return sorted(here - known)


def says(package: Path, room: str) -> str:
    """The first sentence of its docstring."""
    path = package / room
    module = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    text = " ".join((ast.get_docstring(ast.parse(module.read_text())) or "").split("\n\n")[0].split())
    return text.partition(". ")[0].rstrip(".:").replace("`", "")


# -- circles --------------------------------------------------------------------------------------------


def imports(root: Path) -> dict[str, set[str]]:
    """By module of either package, which modules of both it imports anywhere, for types too."""
    files = dict(_modules(root))
    found: dict[str, set[str]] = {}
    for name, path in files.items():
        found[name] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found[name] |= {alias.name for alias in node.names} & files.keys()
            elif isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    found[name] |= {inner if inner in files else node.module} & files.keys()
    return found


def _modules(root: Path) -> Iterator[tuple[str, Path]]:
    for package, place in PACKAGES.items():
        for path in sorted((root / place / package).rglob("*.py")):
            parts = path.relative_to(root / place).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def circles(graph: Mapping[str, Set[str]]) -> list[str]:
    """Modules that import each other, directly or by way of others: what is left when all that import nothing
    of the rest are taken away again and again, from both ends. A package's front page, `gradsieve` itself,
    names what is inside and is no module of the house."""
    left = {
        name: set(targets) - {name, "gradsieve"} for name, targets in graph.items() if name != "gradsieve"
    }
    while True:
        imported = set[str]().union(*left.values())
        kept = {name for name, targets in left.items() if targets & left.keys() and name in imported}
        if len(kept) == len(left):
            return sorted(left)
        left = {name: left[name] & kept for name in kept}


# -- the picture ----------------------------------------------------------------------------------------


def drawn(root: Path) -> str:
    tools = root / PACKAGES["gradsieve_tools"] / "gradsieve_tools"
    rooms = sorted(path.name for path in tools.iterdir() if path.is_dir() and not path.name.startswith("__"))
    rows = [(tools, rooms[start : start + 5], "tools") for start in range(0, len(rooms), 5)]
    rows += [(root / PACKAGES["gradsieve"] / "gradsieve", layer, "") for layer in layers(root)]
    body, top = [], _GAP
    for package, layer, kind in rows:
        width = (_WIDTH - _GAP * (len(layer) + 1)) / len(layer)
        wrapped = [textwrap.wrap(says(package, room), int((width - 2 * _PAD) / _CHARACTER)) for room in layer]
        height = 2 * _PAD + _LINE * (1 + max(map(len, wrapped)))
        for place, (room, lines) in enumerate(zip(layer, wrapped, strict=True)):
            left = _GAP + place * (width + _GAP)
            body.append(
                f'<rect x="{left:.0f}" y="{top}" width="{width:.0f}" height="{height}" class="{kind}"/>'
            )
            body.append(_text(left + _PAD, top + _PAD + 11, room, "name"))
            body += [
                _text(left + _PAD, top + _PAD + 11 + _LINE * line, words)
                for line, words in enumerate(lines, start=1)
            ]
        top += height + _GAP
    foot = "Yellow: gradsieve-tools, which gradsieve never imports. Other rooms import only rooms below them."
    body.append(_text(_GAP, top + 11, foot, "side"))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {top + 20}" role="img">'
    return "\n".join([head, f"<style>{_STYLE}</style>", *body, "</svg>", ""])


def _text(x: float, y: float, words: str, kind: str = "") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}"{kind and f" class={kind!r}"}>{escape(words)}</text>'


if __name__ == "__main__":
    PICTURE.write_text(drawn(ROOT))
    print("circles:", ", ".join(circles(imports(ROOT))) or "none")
