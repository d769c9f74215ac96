"""Two ranks as processes of their own. Each takes one JSON line a request and answers with one.

A rank that raised, died or did not answer in time ends both: the next request finds new ones.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from typing_extensions import Self

MODULE = "gradsieve_tools.doctor.self_test.rank"
WORLD = 2
LIMIT = 90.0  # seconds for an answer: more than any of them takes, and than the time-out of the group
_TO_END = 5.0


class Unanswered(Exception):  # noqa: N818 - how a request ended, not an error of this program
    """Some rank had no good answer; its words are for a finding."""


@dataclass(frozen=True, slots=True)
class Answer:
    value: Any = None
    error: str = ""  # error of a rank that raised, died or is silent


class Pair:
    def __init__(self, **environment: str) -> None:
        # The safe path: a `torch.py` in the current folder is not torch.
        here = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}
        self._environment = {**os.environ, **here, **environment}
        self._ranks: list[subprocess.Popen[str]] = []
        self._folder = tempfile.TemporaryDirectory(prefix="gradsieve-self-test-")
        self._requests = 0

    def ask(self, what: str, *, ranks: int = WORLD, **settings: Any) -> list[Any]:
        """Return what the first `ranks` of them answered; raise unless all answers are good."""
        answers = self.answers(what, ranks=ranks, **settings)
        bad = [f"rank {rank}: {each.error}" for rank, each in enumerate(answers) if each.error]
        if bad:
            self.kill()
            raise Unanswered("; ".join(bad))
        return [each.value for each in answers]

    def answers(self, what: str, *, ranks: int = WORLD, **settings: Any) -> list[Answer]:
        if not self._ranks:
            self._ranks = [self._start(rank) for rank in range(WORLD)]
        self._requests += 1
        store = os.path.join(self._folder.name, f"store{self._requests}")
        request = json.dumps({"what": what, "world": ranks, "store": store, "settings": settings})
        for process in self._ranks[:ranks]:
            assert process.stdin is not None
            with contextlib.suppress(OSError):  # its end is seen where it should answer
                process.stdin.write(f"{request}\n")
                process.stdin.flush()
        deadline = time.monotonic() + LIMIT
        return [self._answer(process, deadline) for process in self._ranks[:ranks]]

    def kill(self) -> None:
        for process in self._ranks:
            process.kill()
        for process in self._ranks:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):  # a request that it never read
                    assert pipe is not None
                    pipe.close()
        self._ranks = []

    def close(self) -> None:
        for process in self._ranks:
            assert process.stdin is not None
            process.stdin.close()
        deadline = time.monotonic() + _TO_END
        while time.monotonic() < deadline and any(process.poll() is None for process in self._ranks):
            time.sleep(0.05)
        self.kill()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.kill()
        self.close()

    def _start(self, rank: int) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", MODULE, str(rank)],
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def _answer(self, process: subprocess.Popen[str], deadline: float) -> Answer:
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return Answer(error=f"no answer within {LIMIT:g} s")
        line = process.stdout.readline()
        if not line:
            return Answer(error=f"its process ended with code {process.wait()}")
        said: Mapping[str, Any] = json.loads(line)
        return Answer(said.get("value"), said.get("error", ""))
