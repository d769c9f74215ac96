"""Tensors in a file, in the layout of safetensors: nothing in such a file can be run.

    8 bytes      length of the header, little-endian
    header       {"name":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},...}, filled up with spaces
    tensors      end to end, in the order of the header, widest types first

The library safetensors reads these files, and its files are read here. gradsieve does not use it: after a
kill -9 it leaves a file under a random name in the folder, only the owner may read its files, and reading
takes three times as much memory.

A file has one meaning: no gaps, no overlaps, lengths as type and shape say. JSON takes some twenty times its
length in memory, so a header may be one part in `SHARE` of a file, or `ALWAYS` bytes long: reading takes less
than twice the file's length + 1 MiB. A file of many tiny tensors gets a tensor `padding`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

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
SHARE, ALWAYS = 32, 1 << 15
PADDING = "padding"
_LINE = 128  # bytes that the padding adds to a header, at most
_MOST = 1 << 48  # elements of a tensor, with dimensions of none counted as one: torch overflows further on


def pieces(tensors: Mapping[str, Tensor], least: int = 0) -> Iterator[memoryview]:
    """Yield the file's bytes in order, padded to at least `least`."""
    ordered = dict(sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])))
    size = sum(tensor.nbytes for tensor in ordered.values())
    long = len(_header(ordered)) + _LINE
    short = max(least, SHARE * long if long > ALWAYS else 0) - size
    if short > 0:  # one byte an element, so that no other tensor changes its place
        ordered[PADDING] = torch.zeros(short, dtype=torch.uint8, device="cpu")
    header = _header(ordered)
    yield memoryview(len(header).to_bytes(8, "little") + header)
    for tensor in ordered.values():
        if tensor.numel():
            yield tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data


def _header(tensors: Mapping[str, Tensor]) -> bytes:
    lines, start = {}, 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise ConfigError(f"{name!r} is of {tensor.dtype}, which a file of tensors cannot hold")
        stop = start + tensor.nbytes
        lines[name] = {"dtype": _NAMES[tensor.dtype], "shape": [*tensor.shape], "data_offsets": [start, stop]}
        start = stop
    header = json.dumps(lines, separators=(",", ":"))
    return header.ljust(-(-len(header) // 8) * 8).encode()


def tensors_in(content: bytearray) -> dict[str, Tensor]:
    """Check the file's content and return its tensors, which share its memory."""
    length = int.from_bytes(content[:8], "little")
    begin = 8 + length
    if len(content) < begin or length > max(ALWAYS, len(content) // SHARE) or length % 8:
        raise Malformed(f"a header of {length} bytes cannot be that of a file of {len(content)}")
    lines, out, cursor = parsed(content[8:begin]), dict[str, Tensor](), begin
    if not isinstance(lines, dict):
        raise Malformed("its header is not one of tensors")
    for number, (name, line) in enumerate(lines.items()):
        match line:
            case {"dtype": str(kind), "shape": list(shape), "data_offsets": [int(start), int(stop)]} if (
                kind in DTYPES and len(line) == 3 and all(type(size) is int and size >= 0 for size in shape)
            ):
                out[name] = _tensor(content, DTYPES[kind], shape, cursor)
            case _:
                raise Malformed(f"entry {number} of its header describes no tensor")
        if (begin + start, begin + stop) != (cursor, cursor + out[name].nbytes):
            raise Malformed(f"tensor {number} of shape {shape} is not where, or as long as, it should be")
        cursor += out[name].nbytes
    if cursor != len(content) or not out:
        raise Malformed(f"it holds {len(content) - begin} bytes of tensors, its header {cursor - begin}")
    return out


def _tensor(content: bytearray, dtype: torch.dtype, shape: list[int], start: int) -> Tensor:
    count = math.prod(shape)
    if math.prod(max(1, size) for size in shape) > _MOST or len(shape) > 16:
        raise Malformed("a tensor in it has an impossible shape")
    if start + count * dtype.itemsize > len(content):
        raise Malformed("a tensor in it goes beyond its end")
    if not count:
        return torch.empty(shape, dtype=dtype, device="cpu")
    if start % dtype.itemsize:
        raise Malformed(f"a tensor in it begins at byte {start}, which is none for {dtype}")
    read = torch.uint8 if dtype == torch.bool else dtype
    tensor = torch.frombuffer(content, dtype=read, count=count, offset=start).view(shape)
    if dtype == torch.bool and bool((tensor > 1).any()):
        raise Malformed("a tensor in it holds bytes that are neither true nor false")
    return tensor.view(dtype)


def parsed(text: bytes | bytearray | str) -> Any:
    """Parse JSON in which no key occurs twice."""
    try:
        return json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"this is not JSON as it is written here: {type(error).__name__}") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("a key twice")
    return out
