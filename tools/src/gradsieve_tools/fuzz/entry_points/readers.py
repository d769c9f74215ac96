"""What reads a peer's bytes, called by itself: a hundred times as many messages as through whole exchanges.

Messages are those of real ranks: the schemes' own packing of what they selected.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import astuple

import numpy as np
import torch
from torch import Tensor

from gradsieve.errors import MismatchError
from gradsieve.kernels import largest
from gradsieve.pipeline.frame import sums_within
from gradsieve.pipeline.tags import Tag, agree, is_notice_given, who_is_idle, words
from gradsieve.schemes import Ctx, Sparse
from gradsieve.schemes.baselines.topk import pack_entries, sum_entries
from gradsieve.schemes.block_buffers import BlockBuffers
from gradsieve.schemes.exclusive import gather_selected, read_rows
from gradsieve.schemes.shares import Owners, quota
from gradsieve.testing import lockstep
from gradsieve.types import Host
from gradsieve.wire import indices
from gradsieve.wire.check import counts_within, dealt_once, lists_increasing, statistics_within
from gradsieve.wire.pairs import from_pairs, to_pairs
from gradsieve.wire.values import VALUE_CODECS, EncodedVector, RowLayout, ValueCodec
from gradsieve_tools.baselines.gtopk import unpacked
from gradsieve_tools.fuzz.entry_points.entry_point import EntryPoint, check_rising
from gradsieve_tools.fuzz.entry_points.exchanges import LIAR, WORLD, Heard, as_bytes, check_lawful, overheard

N, K = 240, 48
_VALUES = 300  # a whole block of codes and a rest
_CANARY = 12345.0  # surrounds the memory that a codec may write


def on_the_host() -> Iterator[EntryPoint]:
    """Return what numpy reads: packed rows, counts, tags."""
    yield from _packed_rows()
    yield from _index_codecs()
    yield from _numbers()
    yield from _tags()


def on_the_device() -> Iterator[EntryPoint]:
    """Return what torch reads, at several times the price: entries, blocks, pairs, values."""
    yield from _entries()
    yield from _blocks()
    yield from _pairs()
    yield from _value_codecs()


def _gradient(n: int, seed: int = 3) -> Tensor:
    source = torch.Generator(device="cpu").manual_seed(seed)
    return torch.randn(n, generator=source, dtype=torch.float32, device="cpu")


def _packed_rows() -> Iterator[EntryPoint]:
    """ExDyna's and MiCRO's: demand, tail, indices in each of the codecs."""
    for n, capacity, threshold in ((N, 24, 0.8), (N, 60, 0.1), (4000, 4, 2.9), (4000, 20, 0.0)):
        cuts = np.array([0, n // 5, n // 2, n - n // 4, n])
        quotas = np.full(WORLD, capacity // 2)
        heard: list[Heard] = []
        programs = [
            gather_selected(_gradient(n), cuts, quotas, capacity, threshold, Ctx(rank, WORLD, 5))
            for rank in range(WORLD)
        ]
        programs[0] = overheard(programs[0], heard)
        lockstep.run(programs)
        rows = heard[0].reply.numpy()
        span = int(np.diff(cuts).max())
        codec = indices.choose(min(capacity, span), span)
        honest = tuple(row.tobytes() for row in np.roll(rows, -LIAR, 0))
        enter = _enter_rows(rows, codec, cuts, min(capacity, span))
        yield EntryPoint(f"row of {codec.name} in {n}", honest, (capacity, span, n, *cuts.tolist()), enter)


def _enter_rows(
    rows: indices.Bytes, codec: indices.IndexCodec, cuts: Host, capacity: int
) -> Callable[[bytearray], None]:
    def enter(forged: bytearray) -> None:
        arrived = rows.copy()
        arrived[LIAR] = np.frombuffer(forged, np.uint8)
        picked = read_rows(arrived, codec, cuts, capacity, Owners(WORLD, WORLD, 5)).picked
        check_rising(picked, int(cuts[-1]))

    return enter


def _index_codecs() -> Iterator[EntryPoint]:
    for capacity, span in ((1, 1), (7, 7), (24, 97), (5, 2**20), (3, 2**33)):
        picked = torch.linspace(0, span - 1, capacity, dtype=torch.float64, device="cpu").long()
        for codec in indices.INDEX_CODECS:
            if codec.predict_size(capacity, span) > 4096:
                continue
            count = torch.tensor(len(picked), dtype=torch.int64, device="cpu")
            filled = torch.nn.functional.pad(picked, (0, capacity - len(picked)))
            row = codec.encode(filled, count, capacity, span)
            honest = as_bytes(count[None]) + as_bytes(row)
            enter = _enter_codec(codec, capacity, span)
            yield EntryPoint(f"{codec.name} of {capacity} in {span}", (honest,), (capacity, span), enter)


def _enter_codec(codec: indices.IndexCodec, capacity: int, span: int) -> Callable[[bytearray], None]:
    def enter(forged: bytearray) -> None:
        data = np.frombuffer(forged, np.uint8)
        found = codec.decode(data[None, 8:], data[:8].view(np.int64), capacity, span)
        check_rising(found, span)

    return enter


def _entries() -> Iterator[EntryPoint]:
    """Indices in one row, values in another: top-k's and those of all that gather entries; gTop-k's."""
    for dtype in (torch.float32, torch.float64):
        messages = []
        for rank in range(WORLD):
            acc = _gradient(N, rank).to(dtype)
            mine = largest(acc, K - rank)
            messages.append(pack_entries(mine, acc[mine], K, N))
        stacked = torch.stack(messages)

        def together(forged: bytearray, stacked: Tensor = stacked, dtype: torch.dtype = dtype) -> None:
            arrived = stacked.clone()
            arrived[LIAR] = torch.frombuffer(forged, dtype=arrived.dtype).view(2, K)
            check_lawful(sum_entries(arrived, N, dtype, Ctx(0, WORLD, 5)), N)

        def alone(forged: bytearray, kind: torch.dtype = stacked.dtype, dtype: torch.dtype = dtype) -> None:
            found, values = unpacked(torch.frombuffer(forged, dtype=kind), dtype, N, "indices")
            check_lawful(Sparse(found, values, N), N)

        honest = tuple(as_bytes(message) for message in messages)
        yield EntryPoint(f"entries, {dtype}", honest, (N, K), together)
        yield EntryPoint(f"entries of one, {dtype}", honest, (N, K), alone)


def _blocks() -> Iterator[EntryPoint]:
    """SparDL's: pairs, block by block, the last blocks followed by the first."""
    even = torch.ones(WORLD, dtype=torch.float64, device="cpu")
    quotas = quota(even, K, 5)
    for first, size in ((0, WORLD), (3, 2), (2, 1)):
        acc = _gradient(N)
        buffers = BlockBuffers(acc, WORLD, quotas, int(quotas.max()))
        message = buffers.pack(buffers.cut(first, size), first, buffers.buffer(first, size))

        def enter(
            forged: bytearray, buffers: BlockBuffers = buffers, first: int = first, size: int = size
        ) -> None:
            entries = buffers.unpack(torch.frombuffer(forged, dtype=torch.int32), first, size, "here")
            block = entries.indices.div(buffers.length, rounding_mode="floor")
            if bool(((block - first) % WORLD >= size).any()) or bool((entries.indices >= N).any()):
                raise AssertionError("an element of another block")

        edges = (N, K, *(buffers.length * block for block in range(WORLD)))
        yield EntryPoint(f"{size} blocks from {first} on", (as_bytes(message),), edges, enter)


def _pairs() -> Iterator[EntryPoint]:
    """Ok-Topk's, to the owner of a region: lists of known lengths, one behind the other."""
    start, stop, counts = 60, 120, torch.tensor([3, 9, 0, 5], dtype=torch.int64, device="cpu")
    lists = [
        largest(_gradient(stop - start, rank), count) + start for rank, count in enumerate(counts.tolist())
    ]
    found = torch.cat(lists)
    honest = as_bytes(to_pairs(found, _gradient(len(found)), N))

    def enter(forged: bytearray) -> None:
        arrived, _ = from_pairs(torch.frombuffer(forged, dtype=torch.int32).view(-1, 2), torch.float32)
        lists_increasing(arrived, counts, start, stop, "indices")
        if bool((arrived < start).any()) or bool((arrived >= stop).any()):
            raise AssertionError("an element of another region")

    yield EntryPoint("pairs to an owner", (honest,), (N, start, stop), enter)


def _value_codecs() -> Iterator[EntryPoint]:
    """Any bytes are values; what is written stays between its edges, and is finite where `bounds` are."""
    for codec in VALUE_CODECS.values():
        honest = as_bytes(codec.encode(_gradient(_VALUES)))
        other = as_bytes(codec.encode(1e30 * _gradient(_VALUES, 4)))
        yield EntryPoint(
            f"{codec.name} of {_VALUES}", (honest, other), (_VALUES,), _enter_values(codec, _VALUES)
        )


def _enter_values(codec: ValueCodec, count: int) -> Callable[[bytearray], None]:
    buffer = torch.full((count + 32,), _CANARY, dtype=torch.float32, device="cpu")
    values, seen = buffer[16 : 16 + count], buffer.numpy()
    before, after, untouched = seen[:16], seen[16 + count :], seen[:16].tobytes()
    shape = RowLayout(codec, 1, count, torch.float32, torch.device("cpu"))

    def enter(forged: bytearray) -> None:
        row = torch.frombuffer(forged, dtype=torch.uint8)
        codec.decode_into(row, values)
        if before.tobytes() != untouched or after.tobytes() != untouched:
            raise AssertionError("written outside of the values")
        bounded = np.isfinite(EncodedVector(shape, row[None]).bounds().numpy()).all()
        if bounded and not np.isfinite(seen).all():
            raise AssertionError("not finite, and the bounds are")

    return enter


def _numbers() -> Iterator[EntryPoint]:
    """Counts, tails and layers by themselves."""
    limits = np.array([3, 60, 0, 240])
    counts = np.array([1, 59, 0, 240]).tobytes()
    tails = np.array([0.0, 3.5, 1e30, 2.0], np.float32).tobytes()
    layers = np.array([2, 0, 1, 3, 5, 4, *(2, 1, 0, 3)], np.int32).tobytes()
    sums = np.array([0.0, 4.0, 1.5, 1e-3], np.float32).tobytes()

    def dealt(forged: bytearray) -> None:
        both = torch.frombuffer(forged, dtype=torch.int32).long()
        dealt_once(both[:6], both[6:], "layers")
        if sum(map(len, both[:6].tensor_split(both[6:].cumsum(0).tolist()))) != 6:
            raise AssertionError("layers lost or made up")

    yield EntryPoint(
        "counts", (counts,), (3, 60, 240), lambda it: counts_within(np.frombuffer(it, np.int64), limits, "x")
    )
    yield EntryPoint("tails", (tails,), (), lambda it: statistics_within(np.frombuffer(it, np.float32), "x"))
    yield EntryPoint("sums", (sums,), (), lambda it: sums_within(np.frombuffer(it, np.float32).tolist(), "x"))
    yield EntryPoint("layers of a leader", (layers,), (6,), dealt)


def _tags() -> Iterator[EntryPoint]:
    """Return what is piggybacked, and what ranks say of themselves where that does not add up."""
    tag, cpu = Tag(0, 17, 2, 0, 3), torch.device("cpu")
    said_by_all = [words(tag, rank, 0, False) for rank in range(WORLD)]
    ride = torch.tensor(said_by_all, dtype=torch.float32, device="cpu").sum(0)
    said = np.array([astuple(tag)] * WORLD)

    def rides(forged: bytearray) -> None:
        heard = np.frombuffer(forged, np.float32).tolist()
        for _ in agree(tag, heard, 0, WORLD, cpu):
            return
        sums_within(heard, "what was piggybacked")
        who_is_idle(heard)
        is_notice_given(heard)

    def says(forged: bytearray) -> None:
        rows = said.copy()
        rows[LIAR] = np.frombuffer(forged, np.int64)
        program = agree(tag, [0.0] * 4, 0, WORLD, cpu)
        next(program)
        with contextlib.suppress(MismatchError):  # which is what it is there to find words for
            program.send(torch.from_numpy(rows))

    yield EntryPoint("tags in a sum", (as_bytes(ride),), (WORLD,), rides)
    yield EntryPoint("tags of a rank", (said[LIAR].tobytes(),), (17, 2, 3), says)
