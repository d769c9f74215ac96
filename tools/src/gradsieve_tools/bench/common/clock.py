"""How long a rank's own work takes, where many ranks run round robin in one thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from gradsieve.schemes import Program, Result


@dataclass(slots=True)
class Clock:
    """Seconds as the processor spent them: other processes on the machine do not count."""

    seconds: float = 0.0

    def call(self, work: Callable[[], Result]) -> Result:
        start = time.thread_time()
        try:
            return work()
        finally:
            self.seconds += time.thread_time() - start

    def program(self, program: Program[Result]) -> Program[Result]:
        """Return the same program. What passes between its asking and the answer is not its own work."""
        reply: Tensor | None = None
        while True:
            try:
                op = self.call(partial(program.send, reply))  # type: ignore[arg-type]  # None starts it
            except StopIteration as end:
                result: Result = end.value
                return result
            reply = yield op
