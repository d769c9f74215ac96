"""The syncs of benches on real ranks: how they are asked for, and what is attached."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from gradsieve.bench import syncs
from gradsieve.bench.syncs import attached, syncs_of
from gradsieve.errors import ConfigError
from gradsieve.schemes import ExDyna, Stripes


def test_what_always_runs_comes_first_and_nothing_twice() -> None:
    assert syncs_of("exdyna,fp16,dense,exdyna", always=["dense"]) == ["dense", "exdyna", "fp16"]
    assert syncs_of("auto,stripes:values=int4", always=[]) == ["auto", "stripes:values=int4"]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("exdyna,nosuch", "no sync is called nosuch; there are: .*auto.*powersgd"),
        ("auto:bits=1", "no sync is called auto:bits=1"),
        ("fp16:rank=2", "no sync is called fp16:rank=2"),
        ("stripes:values=int3", "int3"),
        ("stripes:value=int4", "no setting 'value=int4'"),
        ("stripes:density=0.5", "no setting 'density=0.5'"),
    ],
)
def test_a_sync_that_is_none_is_refused(asked: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        syncs_of(asked, always=["dense"])


@pytest.mark.parametrize(
    ("sync", "asked"),
    [
        ("auto", {}),
        ("stripes", {"scheme": Stripes(), "dense_if_faster": False}),
        ("stripes:values=int4", {"scheme": Stripes(values="int4"), "dense_if_faster": False}),
        ("exdyna", {"scheme": ExDyna(density=0.02), "dense_if_faster": False}),
    ],
)
def test_auto_asks_for_nothing_and_stripes_have_their_own_share(
    sync: str, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[dict[str, Any]] = []
    monkeypatch.setattr(syncs, "DdpSync", lambda *_, **given: found.append(given))
    ddp: DistributedDataParallel = None  # type: ignore[assignment]  # only handed on
    attached(sync, ddp, SGD(nn.Linear(2, 2).parameters()), 0.02, dense_if_faster=False)
    assert found == [asked]
