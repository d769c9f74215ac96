"""Ten trainings whose bits no change alters without saying so: `tests/data/ten.json`.

python scripts/ten_trainings.py           compare with the file; exit code 1 where a training ends otherwise
python scripts/ten_trainings.py --write   write the file; the commit that does so names its ADR
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
FILE = ROOT / "tests" / "data" / "ten.json"
# The same instructions on all processors: sums are formed in another order with wider vectors.
FIXED = {"ATEN_CPU_CAPABILITY": "default", "NUMBA_CPU_NAME": "generic", "OMP_NUM_THREADS": "1"}


def trained() -> dict[str, str]:
    """By training, in a process of its own with fixed instructions."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import json; from laws.ten_trainings import digests; print(json.dumps(digests()))",
        ],
        env={**os.environ, **FIXED, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(arguments: list[str]) -> int:
    found = trained()
    if "--write" in arguments:
        FILE.write_text(json.dumps(found, indent=2) + "\n")
        return 0
    kept = json.loads(FILE.read_text())
    changed = [name for name in found.keys() | kept.keys() if found.get(name) != kept.get(name)]
    for name in sorted(changed):
        print(f"{name}: {kept.get(name)} before, {found.get(name)} now")
    print(f"{len(found) - len(changed)} of {len(kept)} trainings end as before")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
