"""Which files of the library a default training step enters, in order, on both of its threads.

python scripts/files_of_a_step.py            print them
python scripts/files_of_a_step.py --limit    exit code 1 where they are more than `LIMIT`
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from default_training import STEPS, Tracer, run

LIMIT = 22
WATCH = "gradsieve-watch"  # the thread that looks for failures five times a second, whatever a step does


def look(train: Callable[[int], None]) -> Any:
    tracer = Tracer()
    train(STEPS)
    tracer.is_on = True
    train(1)
    tracer.is_on = False
    return tracer.visits


def main(arguments: list[str]) -> int:
    visits: dict[str, list[str]] = run(look)
    visits.pop(WATCH, None)
    every: dict[str, int] = {}
    for thread, files in visits.items():
        print(f"{thread}: " + " > ".join(files))
        for file in files:
            every[file] = every.get(file, 0) + 1
    print(f"{len(every)} files, at most {LIMIT}:")
    for number, (file, times) in enumerate(every.items(), 1):
        print(f"{number:3} {file}" + (f", entered {times} times" if times > 1 else ""))
    return 1 if len(every) > LIMIT and "--limit" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
