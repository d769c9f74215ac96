"""Treatments: what happens to a gradient around the exchange, so that training ends as it would dense.

Two places where the exchange can stand:

    steps       backward -> exchange what this rank's steps moved -> the optimizer steps this rank's own model
    gradients   backward -> exchange gradients -> the optimizer steps the model that all ranks share

The first is the default. Its law: what all ranks' steps have moved is in the model they share, or waits. What
waits is already in the model of the rank it came from, so that no gradient is computed on a model which has
not learnt from the gradients before it; and the optimizer, whichever it is, sees gradients as it always did.

The second is what papers describe, with the parts that were proposed to mend it. The law of each of them:
over all ranks, what left the memories is what the update brought.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from gradsieve.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Treatment:
    """What happens around the exchange. A setting for one kind of exchange only names it in brackets."""

    exchange: Literal["steps", "gradients"] = "steps"
    """What is exchanged: what each rank's optimizer moved, or gradients before the optimizer sees them."""
    every: int = 1
    """Steps to an exchange (steps): in all of them but the last each rank's optimizer goes on alone."""
    preview: float | None = None
    """Part of what waits on this rank that its own model already has (steps). None: as much as it tells of
    what waits on all ranks, which is measured all the time (`feedback/coherence.py`)."""
    late: bool | int = True
    """Steps of computing that an exchange hides behind, which then know nothing of it: `every` at most. True
    is one; with False the exchange is over before the next forward (steps). Above 1 what an exchange reads is
    copied first, n elements more. With False behind DistributedDataParallel only: a loop of one's own calls
    `reduce()` before the optimizer's step, which is late, or after it."""
    momentum: Literal["optimizer", "local", "masked"] = "optimizer"
    """Where SGD's momentum is applied (gradients): after the exchange by the optimizer; by each rank before
    its residual, where it is moved for the user; the same, but forgotten where an element was sent (DGC)."""
    memory: Literal["residual", "estimate"] = "residual"
    """What a rank keeps (gradients): what it has not sent; or what all ranks believe its gradient to be, so
    that only the difference is sent (EF21)."""
    by_rate: bool = False
    """Residuals are in units of learning rate times gradient (gradients): a schedule does not change what
    waits."""
    clip: float | None = None
    """Norm to which a rank's gradient is clipped before it is accumulated, over sqrt(P) (gradients)."""
    warm_up: int = 0
    """Exchanges in which the density falls from 1 to its value, evenly on a logarithmic scale."""
    refresh: int = 0
    """Every so many exchanges all of the vector is sent. 0: never."""
    small: int = 1024
    """Tensors below this many elements, and all vectors, go dense. 0: nothing does."""

    def __post_init__(self) -> None:
        if self.preview is not None and not 0.0 <= self.preview <= 1.0:
            raise ConfigError(f"preview is a part, from 0 to 1, not {self.preview!r}")
        if self.every < 1:
            raise ConfigError(f"every is a number of steps, from 1 up, not {self.every!r}")
        if not 0 <= self.late <= self.every:
            raise ConfigError(
                f"late={self.late} with every={self.every}: an exchange hides behind steps until the "
                f"next one begins, from 0 to {self.every} of them"
            )
        if min(self.warm_up, self.refresh, self.small) < 0:
            raise ConfigError("warm_up, refresh and small are counts: 0 or more")
        if self.clip is not None and not self.clip > 0:
            raise ConfigError(f"clip is a norm above 0, not {self.clip!r}")
        only_gradients = {"momentum": "optimizer", "memory": "residual", "by_rate": False, "clip": None}
        wrong = [name for name, off in only_gradients.items() if getattr(self, name) != off]
        if self.exchange == "steps" and wrong:
            raise ConfigError(
                f"{', '.join(wrong)} change gradients before they are exchanged: use exchange='gradients'"
            )
        if self.by_rate and self.memory == "estimate":
            raise ConfigError("by_rate is for residuals: an estimate has no learning rate in it")
        if self.exchange == "gradients" and self.every > 1:
            raise ConfigError(
                "every is for exchange='steps': a gradient is told in the step it was computed for"
            )
        if self.exchange == "gradients" and self.preview is not None:
            raise ConfigError("preview is for exchange='steps': with gradients all ranks share one model")
        if self.exchange == "gradients" and not self.late:
            raise ConfigError("late=False is for exchange='steps': gradients are never late")

    def density_at(self, step: int, density: float) -> float:
        """Of the exchange after so many."""
        if self.refresh and step % self.refresh == self.refresh - 1:
            return 1.0
        if step < self.warm_up:
            return float(density ** (step / self.warm_up))
        return density

    def describe(self) -> str:
        """What is set, in a few words for a log."""
        default = Treatment()
        changed = {f.name: getattr(self, f.name) for f in fields(self)}
        parts = [f"{k}={v}" for k, v in changed.items() if v != getattr(default, k) and k != "exchange"]
        return ", ".join([f"exchange={self.exchange}", *parts])
