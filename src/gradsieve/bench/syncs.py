"""The syncs that a bench on real ranks compares: schemes, `auto`, and torch's own hooks (`rivals.py`)."""

from __future__ import annotations

from collections.abc import Sequence

from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradsieve.bench.rivals import RIVALS
from gradsieve.errors import ConfigError
from gradsieve.integrations.ddp import DdpSync
from gradsieve.schemes import SCHEMES
from gradsieve.schemes.spec import parse

_NO_SCHEMES = ("auto", *RIVALS)
SYNCS = (*SCHEMES, *_NO_SCHEMES)


def syncs_of(names: str, always: Sequence[str]) -> list[str]:
    """Those that `always` run, then what a person asks for with commas between; each once. Settings may
    follow the name of a scheme: `stripes:values=int4`."""
    wanted = list(dict.fromkeys([*always, *filter(None, names.split(","))]))
    schemes = [sync for sync in wanted if sync not in _NO_SCHEMES]
    unknown = [sync for sync in schemes if sync.partition(":")[0] not in SCHEMES]
    if unknown:
        raise ConfigError(f"no sync is called {', '.join(unknown)}; there are: {', '.join(SYNCS)}")
    for scheme in schemes:
        parse(scheme)
    return wanted


def attached(
    sync: str,
    ddp: DistributedDataParallel,
    optimizer: Optimizer,
    density: float,
    dense_if_faster: bool = True,
) -> DdpSync:
    """One of ours. `auto`: what a user gets who asks for nothing. Stripes choose no elements and have their
    own share."""
    if sync == "auto":
        return DdpSync(ddp, optimizer)
    scheme = parse(sync, None if sync.partition(":")[0] == "stripes" else density)
    return DdpSync(ddp, optimizer, scheme=scheme, dense_if_faster=dense_if_faster)
