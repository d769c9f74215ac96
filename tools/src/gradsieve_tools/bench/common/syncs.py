"""The syncs that a bench on real ranks compares: schemes, `auto`, and torch's own hooks (`rivals/names.py`).

    exdyna                            a scheme
    exdyna:values=sign                with settings, as every bench takes them
    exdyna@paper                      with exchange settings, as `bench accuracy --treatments` takes them
    spardl:teams=2@steps:every=2     both
    stripes:density=1@steps:every=30  stripes have a density of their own

What is no scheme of ours has neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradsieve import Steps
from gradsieve.errors import ConfigError
from gradsieve.parallel.ddp import DdpSync
from gradsieve.schemes import SCHEMES, Scheme
from gradsieve.testing import Exchange
from gradsieve_tools.bench.rivals.names import RIVALS
from gradsieve_tools.specs import parse, parse_exchange

_NO_SCHEMES = ("auto", *RIVALS)
SYNCS = (*SCHEMES, *_NO_SCHEMES)


def syncs_of(names: str, always: Sequence[str]) -> list[str]:
    """Return syncs that `always` run, then those of the comma-separated text, without repetition."""
    wanted = list(dict.fromkeys([*always, *filter(None, names.split(","))]))
    for sync in wanted:
        if sync not in _NO_SCHEMES:
            treated(sync)  # refused here rather than by every host
    return wanted


def treated(sync: str, density: float | None = None) -> tuple[Scheme[Any], Exchange]:
    """A scheme, at that density if it chooses elements, and what happens around its exchange."""
    text, at, exchange = sync.partition("@")
    name = text.partition(":")[0]
    if name not in SCHEMES:
        raise ConfigError(f"no sync is called {sync}; there are: {', '.join(SYNCS)}")
    # What stripes send need not be as little as what others choose: the text may say how much.
    scheme = parse(text, fixed=()) if name == "stripes" else parse(text, density)
    if at and scheme.lossless:
        raise ConfigError(f"{name} has no residual, and so no exchange settings: {sync}")
    return scheme, parse_exchange(exchange if at else "default", scheme)


def steps_late(sync: str) -> int | None:
    """Return the most steps until a gradient knows other ranks' updates; None: it never does."""
    if sync == "noop":
        return None
    if sync == "auto":
        return 1
    if sync in _NO_SCHEMES:
        return 0
    _, exchange = treated(sync)
    return int(isinstance(exchange, Steps) and exchange.overlap) + exchange.every - 1


def attached(
    sync: str,
    ddp: DistributedDataParallel,
    optimizer: Optimizer,
    density: float,
) -> DdpSync:
    """Attach one of our syncs; `auto` is what a user gets who asks for nothing."""
    if sync == "auto":
        return DdpSync(ddp, optimizer)
    scheme, exchange = treated(sync, density)
    return DdpSync(ddp, optimizer, scheme=scheme, exchange=exchange)
