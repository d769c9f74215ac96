"""Tensors in a file, in the layout of safetensors: nothing in it can be run.

    8 bytes      length of the header, little-endian
    header       {"name":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},...}, filled up with spaces
    tensors      end to end, in the order of the header, widest types first

What is read is strict, so that a file has one meaning: offsets without gaps or overlaps, lengths as type and
shape say, nothing before, between or behind. The header is not handed to a JSON parser, which would make
objects of twenty times its length; tensors are views of what was read, made when they are asked for. With the
header no longer than a sixteenth of the file, or 64 KiB, reading takes less than twice the file's length
+ 1 MiB. Files with many tiny tensors have a tensor `padding` for that.

Names are percent-encoded but for letters, digits and _.-/ so that no escapes are needed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from urllib.parse import quote, unquote

import torch
from torch import Tensor

from gradsieve.errors import ConfigError, Malformed

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
SHARE, ALWAYS = 16, 1 << 16
"""The header may be one part in so many of the file, or this long."""
PADDING = "padding"
_LINE = 128
"""Bytes that the padding adds to the header, at most."""
_MOST = 1 << 48
"""Elements of a tensor, with dimensions of none counted as one: torch overflows further on."""
_ENTRY = re.compile(
    rb'"([A-Za-z0-9_.\-/%]{1,1024})":\{"dtype":"([A-Z0-9]{2,4})",'
    rb'"shape":\[((?:\d{1,15}(?:,\d{1,15}){0,15})?)\],"data_offsets":\[(\d{1,15}),(\d{1,15})\]\}'
)


def pieces(tensors: Mapping[str, Tensor], buffer: int = 0) -> Iterator[memoryview]:
    """The file's bytes, from the first to the last; padded to at least `buffer`."""
    header, size = _header(tensors)
    long = len(header) + _LINE
    short = max(buffer, SHARE * long if long > ALWAYS else 0) - size
    if short > 0:
        tensors = {**tensors, PADDING: torch.zeros(short, dtype=torch.uint8, device="cpu")}
        header, _ = _header(tensors)
    yield memoryview(len(header).to_bytes(8, "little"))
    yield memoryview(header)
    for _, tensor in _in_order(tensors):
        if tensor.numel():
            flat = tensor.detach().cpu().contiguous().view(-1)
            yield flat.view(torch.uint8).numpy().data


def _header(tensors: Mapping[str, Tensor]) -> tuple[bytes, int]:
    """And how many bytes follow it."""
    entries, start = [], 0
    for name, tensor in _in_order(tensors):
        if tensor.dtype not in _NAMES:
            raise ConfigError(f"{name!r} is of {tensor.dtype}, which a file of tensors cannot hold")
        stop = start + tensor.numel() * tensor.element_size()
        shape = ",".join(map(str, tensor.shape))
        entries.append(
            f'"{quote(name, safe="/")}":{{"dtype":"{_NAMES[tensor.dtype]}","shape":[{shape}],'
            f'"data_offsets":[{start},{stop}]}}'.replace("~", "%7E")
        )
        start = stop
    header = "{" + ",".join(entries) + "}"
    return header.ljust(-(-len(header) // 8) * 8).encode(), start


def _in_order(tensors: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
    """Widest first: every tensor then begins at a multiple of its width. Padding changes no other's place."""
    return sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0] == PADDING, item[0]))


class TensorFile(Mapping[str, Tensor]):
    """What such a file holds, checked; tensors share the memory of `content`."""

    def __init__(self, content: bytearray) -> None:
        self._content = content
        length = int.from_bytes(content[:8], "little")
        if len(content) < 8 or length > len(content) - 8:
            raise Malformed(
                f"it ends within its header: {len(content)} bytes, where {8 + length} belong to it"
            )
        if length % 8:
            raise Malformed(f"its header of {length} bytes does not end at a multiple of 8")
        if length > max(ALWAYS, len(content) // SHARE):
            raise Malformed(f"a header of {length} bytes is too long for a file of {len(content)}")
        self._begin = 8 + length
        self._places: dict[str, int] = {}
        """Where a tensor's line in the header begins, by name."""
        self._check_header()

    def _check_header(self) -> None:
        place, cursor = 8, 0
        before = b"{"
        while self._content[place : place + 1] == before:
            line = _ENTRY.match(self._content, place + 1, self._begin)
            if line is None:
                break
            name = unquote(line[1].decode())
            if name in self._places:
                raise Malformed(f"it has two tensors {name!r}")
            self._places[name] = place + 1
            cursor = self._check_line(name, line, cursor)
            place, before = line.end(), b","
        rest = self._content[place : self._begin]
        if not self._places or rest.rstrip(b" ") != b"}":
            raise Malformed(f"its header is not one of tensors, at byte {place}")
        if cursor != len(self._content) - self._begin:
            held = len(self._content) - self._begin
            raise Malformed(f"it holds {held} bytes of tensors, where its header has {cursor}")

    def _check_line(self, name: str, line: re.Match[bytes], cursor: int) -> int:
        """The tensor follows the one before and is as long as it should be; where it ends."""
        dtype = DTYPES.get(line[2].decode())
        if dtype is None:
            raise Malformed(f"{name!r} is of a type that is not known here, {line[2].decode()}")
        shape, start, stop = _shape(line), int(line[4]), int(line[5])
        if math.prod(max(1, size) for size in shape) > _MOST:
            raise Malformed(f"{name!r} has the impossible shape {shape}")
        if start != cursor or start % dtype.itemsize:
            raise Malformed(f"{name!r} begins at byte {start} of the tensors, not at {cursor}")
        if stop - start != math.prod(shape) * dtype.itemsize:
            raise Malformed(f"{name!r} has {stop - start} bytes, which is not what its shape {shape} takes")
        return stop

    def __getitem__(self, name: str) -> Tensor:
        line = _ENTRY.match(self._content, self._places[name], self._begin)
        assert line is not None
        dtype, shape, start = DTYPES[line[2].decode()], _shape(line), self._begin + int(line[4])
        count = math.prod(shape)
        if not count:
            return torch.empty(shape, dtype=dtype, device="cpu")
        read = torch.uint8 if dtype == torch.bool else dtype
        tensor = torch.frombuffer(self._content, dtype=read, count=count, offset=start).view(shape)
        if dtype != torch.bool:
            return tensor
        if bool((tensor > 1).any()):
            raise Malformed(f"{name!r} holds bytes that are neither true nor false")
        return tensor.view(torch.bool)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    @property
    def bytes(self) -> int:
        return len(self._content)


def _shape(line: re.Match[bytes]) -> tuple[int, ...]:
    return tuple(int(size) for size in line[3].split(b",")) if line[3] else ()
