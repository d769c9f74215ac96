"""Rows of shards are those that FSDP cuts, and any cut can be made of any other."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from gradsieve.checkpoint.reshard import overlap, rows_of

counts = st.integers(1, 9)


@given(rows=st.integers(1, 40), shards=counts)
def test_shards_are_torchs_chunks(rows: int, shards: int) -> None:
    chunks = [list(chunk) for chunk in torch.arange(rows).chunk(shards)]
    chunks += [[]] * (shards - len(chunks))
    assert [list(rows_of(rows, shard, shards)) for shard in range(shards)] == chunks


@given(rows=st.integers(1, 40), old=counts, new=counts)
def test_every_row_of_a_new_shard_comes_from_one_old_shard(rows: int, old: int, new: int) -> None:
    for shard in range(new):
        ours = rows_of(rows, shard, new)
        parts = [overlap(ours, rows_of(rows, other, old)) for other in range(old)]
        assert [row for part in parts for row in part] == list(ours)
