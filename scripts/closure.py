"""How much of the library a default training loads: modules and lines, after `attach` and after 16 steps.

python scripts/closure.py            print them by package
python scripts/closure.py --limit    exit code 1 where they are more than `LIMITS` says
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from default_training import STEPS, modules, run

SOURCE = Path(__file__).parent.parent / "src" / "gradsieve"
# Of today. A change that makes the library smaller lowers them; none raises them without an ADR.
LIMITS = {"lines": 16300, "modules": 106, "loaded lines": 8400, "loaded modules": 42}


def look(train: Callable[[int], None]) -> Any:
    train(0)
    attached = modules()
    train(STEPS)
    return attached, modules()


def room_of(module: str) -> str:
    path = SOURCE.joinpath(*module.split(".")[1:2])
    return path.name if path.is_dir() and path != SOURCE else "(top)"


def main(arguments: list[str]) -> int:
    attached, trained = run(look)
    files = list(SOURCE.rglob("*.py"))
    lines = {file: len(file.read_text().splitlines()) for file in files}
    found = {
        "lines": sum(lines.values()),
        "modules": len(files),
        "loaded lines": sum(trained.values()),
        "loaded modules": len(trained),
    }
    print(f"attach loads {sum(attached.values()):,} lines in {len(attached)} modules")
    for name, value in found.items():
        print(f"{name}: {value:,} of at most {LIMITS[name]:,}")
    rooms: Counter[str] = Counter()
    for file, count in lines.items():
        parts = file.relative_to(SOURCE).parts
        rooms[parts[0] if len(parts) > 1 else "(top)"] += count
    for room, count in rooms.most_common():
        loaded = sum(n for name, n in trained.items() if room == room_of(name))
        print(f"  {room:12} {count:6,} lines, {loaded:6,} loaded")
    too_much = [name for name, value in found.items() if value > LIMITS[name]]
    return 1 if too_much and "--limit" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
