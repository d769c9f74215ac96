"""The syncs of benches on real ranks: how they are asked for, and what is attached."""

from __future__ import annotations

import pytest

from gradsieve.errors import ConfigError
from gradsieve_tools.bench.common.syncs import syncs_of


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
