"""What a test sees from outside: the lines of a log, and a script started as a user starts it."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path


class Lines(logging.Handler):
    """Listens to gradsieve's log from now on."""

    def __init__(self, level: int = logging.WARNING) -> None:
        super().__init__()
        self.lines: list[str] = []
        log = logging.getLogger("gradsieve")
        log.setLevel(level)
        log.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def torchrun(script: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """On two ranks; fails the test where the script does."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launch, str(script), *words],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done
