"""examples/restarts.py for torchrun, with kernels that are loaded at once."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from gradsieve import kernels

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import restarts


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run")
    parser.add_argument("--steps", type=int)
    args = parser.parse_args()
    with kernels.using("torch"):
        words = restarts.main(args.run, steps=args.steps, step_seconds=0.05)
    print(f"rank {os.environ['RANK']}: {words}", flush=True)


if __name__ == "__main__":
    main()
