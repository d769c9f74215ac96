"""The same training by plain DDP, Accelerate, Lightning and Trainer: the same bits, also when gone on from.

    python benchmarks/frameworks.py --ranks 4 --steps 50 --save-at 25 --json FILE

Each script of examples/frameworks is started twice by torchrun: once from the first step to the last, saving
in between, and once, in new processes, from what was saved to the last. Then what each of them saved is
loaded into a plain model, without gradsieve, and judged. Raises unless all is equal.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[1] / "examples" / "frameworks"
NAMES = ("plain", "with_accelerate", "with_lightning", "with_trainer")


def trained(name: str, folder: Path, args: argparse.Namespace, *words: str) -> list[dict[str, Any]]:
    """How each rank ended."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.ranks}"]
    settings = ["--steps", str(args.steps), "--save-at", str(args.save_at), *words]
    done = subprocess.run(  # noqa: S603 - our own scripts
        [*launch, str(EXAMPLES / f"{name}.py"), str(folder), *settings],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=1800,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    ends = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"name"')]
    return sorted(ends, key=lambda end: end["rank"])


def saved(name: str, folder: Path, step: int) -> dict[str, Any]:
    """Accuracy and bits of what is on disk."""
    sys.path.insert(0, str(EXAMPLES))
    import task
    from saved import model_saved_by

    model = model_saved_by(name, folder, step)
    return {"accuracy": task.accuracy(model), "bits": task.bits(model)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--save-at", type=int, default=25)
    parser.add_argument("--names", default=",".join(NAMES))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    names, rows = tuple(args.names.split(",")), []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name in names:
            begin = time.perf_counter()
            whole = trained(name, folder / name, args)
            found = saved(name, folder / name, args.save_at)  # now: Lightning saves again when it goes on
            resumed = trained(name, folder / name, args, "--resume")
            seconds = round(time.perf_counter() - begin, 1)
            row = {"name": name, "whole": whole, "resumed": resumed, "saved": found, "seconds": seconds}
            rows.append(row)
            print(name, whole[0]["accuracy"], seconds, "s", flush=True)
    ends = [end for row in rows for end in row["whole"] + row["resumed"]]
    first = rows[0]["whole"][0]
    assert len({end["bits"] for end in ends}) == 1, "not the same bits"
    assert len(ends) == 2 * args.ranks * len(names)
    assert all(row["saved"]["bits"] == first["saved_bits"] for row in rows), "another model was saved"
    assert all(row["saved"]["accuracy"] == first["saved_accuracy"] for row in rows)
    print(f"{len(ends)} ends with the same bits; what was saved has accuracy {first['saved_accuracy']:.4f}")
    if args.json:
        from gradsieve_tools.results import write

        config = {key: getattr(args, key) for key in ("ranks", "steps", "save_at", "names")}
        write(args.json, config, rows)


if __name__ == "__main__":
    main()
