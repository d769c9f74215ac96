"""Writes `.ci/requirements.txt`: the gate's packages, each with its version and hash.

    python scripts/lock.py

It runs on the gate's own Python and platform, since files differ by both. torch is left out: indexes have
different builds of it, for the CPU or for CUDA, and `.ci/run` asks for its version alone.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOCKED = ROOT / ".ci" / "requirements.txt"
TORCH = "torch==2.13.0"
APART = {"gradsieve", "gradsieve-tools", "torch"}


def chosen() -> dict[str, tuple[str, str]]:
    """Version and hash of each package, by its name."""
    asked = [f"{ROOT}[dev,docs]", f"{ROOT / 'tools'}[completion,plot]", TORCH, "numpy"]
    command = ["-m", "pip", "install", "-q", "--dry-run", "--ignore-installed", "--report", "-", *asked]
    report = json.loads(subprocess.run([sys.executable, *command], stdout=subprocess.PIPE, check=True).stdout)
    out = {}
    for each in report["install"]:
        name = each["metadata"]["name"].lower().replace("_", "-")
        if name not in APART:
            out[name] = each["metadata"]["version"], each["download_info"]["archive_info"]["hashes"]["sha256"]
    return out


def main() -> None:
    packages = sorted(chosen().items())
    lines = [f"{name}=={version} --hash=sha256:{digest}" for name, (version, digest) in packages]
    LOCKED.write_text("\n".join(["# Written by scripts/lock.py.", *lines, ""]))
    print(f"{LOCKED.relative_to(ROOT)}: {len(lines)} packages")


if __name__ == "__main__":
    main()
