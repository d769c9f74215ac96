"""What the fuzzer and a reading of every reader found: each was let in once, or crashed an honest rank."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gradsieve.comm.links import measure_links
from gradsieve.comm.ops import AllReduce
from gradsieve.errors import Malformed
from gradsieve.pipeline.frame import CHECKSUM_WORDS
from gradsieve.pipeline.tags import WORDS
from gradsieve.types import Ctx
from gradsieve.wire.indices import INDEX_CODECS
from gradsieve_tools.fuzz.entry_points import exchanges
from gradsieve_tools.fuzz.entry_points.exchanges import Victim, as_bytes, liars_part, trained
from gradsieve_tools.specs import parse
from hostile.test_hostile_pipelines import attacked, victim


def forged(target: Victim, number: int, change: Any) -> None:
    """The victim's step with the liar's part of reply `number` changed in place."""
    part = liars_part(target.heard[number])
    assert part is not None
    frame = bytearray(as_bytes(part))
    target.step(number, frame)  # as it is, it is let in
    change(torch.frombuffer(frame, dtype=part.dtype).view(part.shape))
    target.step(number, frame)


def kinds(target: Victim) -> list[str]:
    return [type(heard.op).__name__ for heard in target.heard]


@pytest.mark.parametrize("across", ["b-sag", "r-sag"])
def test_an_element_of_another_block_is_refused(across: str) -> None:
    """Between teams: it had no place in the message that the victim packed next, an IndexError there."""
    target = trained(parse(f"spardl:teams=2+across={across}", 0.2), 5)
    block = exchanges.N // 2

    def change(message: Tensor) -> None:
        message.view(-1, 2)[-1, 0] = block + 1  # the first block of two is the victim's

    with pytest.raises(Malformed, match="of block 0 from team"):
        forged(target, 1, change)


def test_an_element_of_a_block_that_was_not_sent_is_refused() -> None:
    target = trained(parse("spardl", 0.2), 5)

    def change(message: Tensor) -> None:
        message.view(-1, 2)[-1, 0] = exchanges.N - 1  # two of four blocks arrive first, from the first one on

    with pytest.raises(Malformed, match="from place 2, counted from block 0 on"):
        forged(target, 0, change)


def test_norms_below_zero_are_refused() -> None:
    """They divided k into nothing, so that nothing was sent and nobody said so."""
    target = trained(parse("deft", 0.2), 5)
    with pytest.raises(Malformed, match=r"norms of layers in step 5 add up to -1\.0"):
        forged(target, 0, lambda norms: norms[0].fill_(-1.0))


@pytest.mark.parametrize("scheme", ["micro", "micro-paper", "exdyna-paper", "dgc", "oktopk"])
def test_a_rank_announces_no_more_than_it_can_have(scheme: str) -> None:
    """A count of all there is would make every rank prepare for that many from every rank."""
    target = trained(parse(scheme, 0.2), 5)
    number = kinds(target).index("AllGather")

    def change(message: Tensor) -> None:
        counts = message[:8].view(torch.int64) if scheme == "micro" else message
        counts[0] = 120

    with pytest.raises(Malformed, match=r"rank 1 announced 120 .* in step 5; between 0 and"):
        forged(target, number, change)


@pytest.mark.parametrize("word", range(2, WORDS))
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, -1.0])
def test_what_rides_along_is_finite_and_from_zero_up(word: int, value: float) -> None:
    """How many are idle was made an integer of: ValueError, OverflowError."""

    def change(ride: Tensor) -> None:
        ride[len(ride) - CHECKSUM_WORDS - WORDS + word] = value

    with pytest.raises(Malformed, match="what was piggybacked on unit 0 in step 3 add up to"):
        attacked(victim("stripes", budget=True), change)


@pytest.mark.parametrize("seconds", [torch.nan, torch.inf, -1.0])
def test_seconds_of_links_that_no_clock_shows_are_refused(seconds: float) -> None:
    program = measure_links(Ctx(0, 2, 0), torch.device("cpu"))
    op = next(program)
    while not isinstance(op, AllReduce):
        op = program.send(op.tensor)
    with pytest.raises(Malformed, match="seconds in the mean over ranks"):
        program.send(torch.tensor([1e-4, seconds]))


def test_what_decoding_allocates_is_bounded_by_message_and_result() -> None:
    """Twice both and 1 MiB, for each codec of indices. Beside it, that it would be seen."""
    ranks, capacity = 4, 300_000
    for codec in INDEX_CODECS:
        span = 4 * capacity if codec.name == "bitmap" else 100 * capacity
        picked = torch.arange(capacity) * (span // capacity)
        row = codec.encode(picked, torch.tensor(capacity), capacity, span).numpy()
        rows, counts = np.stack([row] * ranks), np.full(ranks, capacity)
        tracemalloc.start()
        found = codec.decode(rows, counts, capacity, span)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        np.unpackbits(rows, axis=1)
        at_once = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak <= 2 * (rows.nbytes + found.nbytes) + 2**20, codec.name
        assert at_once > found.nbytes + 7 * rows.nbytes, "tracemalloc sees what numpy takes"


def test_the_victims_own_word_is_not_the_liars() -> None:
    """The twin of `forged`: unchanged, every reply of every kind is let in and nothing is different."""
    target = trained(parse("exdyna", 0.2), 5)
    for number, heard in enumerate(target.heard):
        part = liars_part(heard)
        assert part is not None
        same = target.step(number, bytearray(as_bytes(part)))
        again = replace(target).step(-1, bytearray())
        assert torch.equal(same.update.to_dense(), again.update.to_dense())
