"""Vectors for compiled kernels, by address: `Tensor.numpy()` forbids their owner to resize them, for ever.

And the bits of numbers, which are compared faster than these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import carray, float32, int64, types, uint8  # type: ignore[attr-defined]
from numba.extending import intrinsic, register_jitable

INFINITE = 0x7F800000
"""The bits of infinity; those of every NaN are more."""


def _type_pointer(kind: Any) -> Callable[..., Any]:
    def typed(_: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(kind)(address), generate  # type: ignore[no-untyped-call]

    return typed


def _type_reread(kind: Any, lowered: Any) -> Callable[..., Any]:
    """The same 32 bits as another type."""

    def typed(_: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.bitcast(arguments[0], lowered)

        return kind(value), generate

    return typed


bits_of: Any = intrinsic(_type_reread(types.uint32, ir.IntType(32)))
float_of: Any = intrinsic(_type_reread(types.float32, ir.FloatType()))
_float_pointer: Any = intrinsic(_type_pointer(float32))
_integer_pointer: Any = intrinsic(_type_pointer(int64))
_byte_pointer: Any = intrinsic(_type_pointer(uint8))


@register_jitable
def floats_at(address: Any, n: Any) -> Any:
    return carray(_float_pointer(address), n)


@register_jitable
def integers_at(address: Any, n: Any) -> Any:
    return carray(_integer_pointer(address), n)


@register_jitable
def bytes_at(address: Any, n: Any) -> Any:
    return carray(_byte_pointer(address), n)
