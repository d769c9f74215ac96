"""The syncs of benches on real ranks: how they are asked for, and what is attached."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from gradsieve.errors import ConfigError
from gradsieve.pipeline.exchange_settings import Gradients, Steps
from gradsieve.schemes import ExDyna, Stripes
from gradsieve_tools.bench.common import syncs
from gradsieve_tools.bench.common.syncs import attached, syncs_of


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("exdyna,nosuch", "no sync is called nosuch; there are: .*auto.*powersgd"),
        ("auto:bits=1", "no sync is called auto:bits=1"),
        ("fp16:rank=2", "no sync is called fp16:rank=2"),
        ("stripes:values=int3", "int3"),
        ("stripes:value=int4", "no setting 'value=int4'"),
        ("exdyna:density=0.5", "no setting 'density=0.5'"),
        ("exdyna@papers", "no exchange settings 'papers'"),
        ("exdyna@", "no exchange settings ''"),
        ("exdyna@steps:lat=false", "no setting 'lat=false'"),
        ("exdyna@gradients:overlap=1", "gradients has no setting 'overlap=1'"),
        ("dense@paper", "dense has no residual"),
        ("fp16@paper", "no sync is called fp16@paper"),
        ("auto@paper", "no sync is called auto@paper"),
    ],
)
def test_a_sync_that_is_none_is_refused(asked: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        syncs_of(asked, always=["dense"])


@pytest.mark.parametrize(
    ("sync", "asked"),
    [
        ("auto", {}),
        ("stripes", {"scheme": Stripes(), "exchange": Steps()}),
        (
            "stripes:density=1+values=int2@steps:every=30+overlap=5",
            {"scheme": Stripes(density=1.0, values="int2"), "exchange": Steps(every=30, overlap=5)},
        ),
        (
            "stripes:values=int4@steps:every=2",
            {"scheme": Stripes(values="int4"), "exchange": Steps(every=2)},
        ),
        ("exdyna", {"scheme": ExDyna(density=0.02), "exchange": Steps()}),
        (
            "exdyna:values=sign@gradients:small=7",
            {"scheme": ExDyna(density=0.02, values="sign"), "exchange": Gradients(small=7)},
        ),
        (
            "exdyna@paper",
            {"scheme": ExDyna(density=0.02), "exchange": Gradients(small=0)},
        ),
    ],
)
def test_auto_asks_for_nothing_stripes_have_their_own_share_and_what_was_published_is_never_dense(
    sync: str, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[dict[str, Any]] = []
    monkeypatch.setattr(syncs, "DdpSync", lambda *_, **given: found.append(given))
    ddp: DistributedDataParallel = None  # type: ignore[assignment]  # only handed on
    attached(sync, ddp, SGD(nn.Linear(2, 2).parameters()), 0.02)
    assert found == [asked]
