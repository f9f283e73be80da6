"""The leaves of a batch: tensors, numbers, strings and bytes, and what is sent of each."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch

from gpudist.batch.reading import Reader, malformed, write_counted, write_text, write_varint

# Numbers on the wire; only ever add at the end.
_DTYPE_NAMES = (
    *("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32"),
    *("float64", "complex64", "complex128", "uint16", "uint32", "uint64", "complex32"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    "float4_e2m1fn_x2",
)
DTYPES: tuple[torch.dtype, ...] = tuple(getattr(torch, name) for name in _DTYPE_NAMES)
DTYPE_NUMBERS = {dtype: number for number, dtype in enumerate(DTYPES)}
# Those whose gradients can be summed.
SUMMED = frozenset(DTYPES[number] for number in (6, 7, 8, 9, 10, 11))

NONE, BOOL, INT, FLOAT, COMPLEX, TEXT, BYTES, TENSOR = range(8)
PLAIN = {
    type(None): NONE, bool: BOOL, int: INT, float: FLOAT, complex: COMPLEX, str: TEXT, bytes: BYTES,
}  # fmt: skip

MAX_DIMS = 64
_MAX_ITEMS = 1 << 60
_FLOAT = struct.Struct("<d")
_COMPLEX = struct.Struct("<dd")


@dataclass(frozen=True)
class Leaf:
    """What is the same at every step.

    Attributes:
        kind: ``TENSOR``, or that of a plain value.
        dtype, dims: of a tensor; its extents are not the same at every step.
        requires_grad: the tensor gets a gradient.
    """

    kind: int
    dtype: torch.dtype = torch.uint8
    dims: int = 0
    requires_grad: bool = False


class TensorSpec(NamedTuple):
    """A tensor that is yet to come."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def write_value(out: bytearray, kind: int, value: Any) -> None:
    """Append a plain value, or the extents of a tensor."""
    if kind == TENSOR:
        for extent in value.shape:
            write_varint(out, extent)
    elif kind == BOOL:
        out.append(value)
    elif kind == INT:
        write_counted(out, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))
    elif kind == FLOAT:
        out += _FLOAT.pack(value)
    elif kind == COMPLEX:
        out += _COMPLEX.pack(value.real, value.imag)
    elif kind == TEXT:
        write_text(out, value)
    elif kind == BYTES:
        write_counted(out, value)


def read_value(reader: Reader, leaf: Leaf) -> Any:
    """What :func:`write_value` wrote; a ``TensorSpec`` for a tensor."""
    kind = leaf.kind
    if kind == TENSOR:
        return _read_spec(reader, leaf)
    if kind == BOOL:
        byte = reader.byte()
        if byte > 1:
            raise malformed(f"a bool is {byte}")
        return bool(byte)
    if kind == INT:
        return int.from_bytes(reader.counted(), "little", signed=True)
    if kind == FLOAT:
        return _FLOAT.unpack(reader.take(_FLOAT.size))[0]
    if kind == COMPLEX:
        return complex(*_COMPLEX.unpack(reader.take(_COMPLEX.size)))
    if kind == TEXT:
        return reader.text()
    return reader.counted() if kind == BYTES else None


def _read_spec(reader: Reader, leaf: Leaf) -> TensorSpec:
    shape = tuple([reader.varint() for _ in range(leaf.dims)])
    # An empty tensor too has strides, which must be numbers of 64 bits.
    if prod([extent or 1 for extent in shape]) > _MAX_ITEMS:
        raise malformed(f"a tensor has the shape {list(shape)}")
    return TensorSpec(leaf.dtype, shape)


def write_values(leaves: Sequence[Leaf], values: Sequence[Any]) -> bytes:
    """What changes from step to step: the plain values, and the extents of tensors."""
    out = bytearray()
    for leaf, value in zip(leaves, values, strict=True):
        write_value(out, leaf.kind, value)
    return bytes(out)


def read_values(leaves: Sequence[Leaf], data: bytes) -> list[Any]:
    """What :func:`write_values` wrote, with a ``TensorSpec`` in place of each tensor.

    Raises:
        TransportError: these bytes are no values of these leaves.
    """
    reader = Reader(data)
    values = [read_value(reader, leaf) for leaf in leaves]
    reader.finish()
    return values
