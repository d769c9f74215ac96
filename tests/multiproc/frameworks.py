"""The trainings of `frameworks_script.py`, run once for all tests that look at them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).with_name("frameworks_script.py")
STEPS, SAVE_AT = 6, 3
Ends = dict[str, list[dict[str, Any]]]


@cache
def ends(*names: str) -> tuple[Ends, Ends]:
    """Return how each training ended, by name and rank, and how it did when gone on from."""
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [sys.executable, str(SCRIPT), folder, str(STEPS), str(SAVE_AT), *names],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        try:
            said, errors = process.communicate(timeout=280)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
    assert process.returncode == 0, errors
    whole, _, resumed = said.partition('{"name": "resume"}')
    return _by_name(whole), _by_name(resumed)


def _by_name(said: str) -> Ends:
    out: Ends = {}
    for line in said.splitlines():
        if line.startswith('{"name"'):
            end = json.loads(line)
            out.setdefault(end["name"], []).append(end)
    return {name: sorted(every, key=lambda end: end["rank"]) for name, every in out.items()}
