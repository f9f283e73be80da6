"""Leaves of a batch: tensors, numbers, strings and bytes, and how each is encoded."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch

from gpudist.batch.reading import Reader, malformed, write_counted, write_text

# Messages refer to dtypes by position in this list, so only append to it.
_DTYPE_NAMES = (
    *("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32"),
    *("float64", "complex64", "complex128", "uint16", "uint32", "uint64", "complex32"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    "float4_e2m1fn_x2",
)
DTYPES: tuple[torch.dtype, ...] = tuple(getattr(torch, name) for name in _DTYPE_NAMES)
DTYPE_NUMBERS = {dtype: number for number, dtype in enumerate(DTYPES)}
# Dtypes whose gradients can be summed.
SUMMED = frozenset(DTYPES[number] for number in (6, 7, 8, 9, 10, 11))

NONE, BOOL, INT, FLOAT, COMPLEX, TEXT, BYTES, TENSOR = range(8)
PLAIN = {
    type(None): NONE, bool: BOOL, int: INT, float: FLOAT, complex: COMPLEX, str: TEXT, bytes: BYTES,
}  # fmt: skip

MAX_DIMS = 64
_MAX_ITEMS = 1 << 60
_MAX_NARROW = (1 << 32) - 1
_FLOAT = struct.Struct("<d")
_COMPLEX = struct.Struct("<dd")


@dataclass(frozen=True)
class Leaf:
    """Properties of a leaf that are the same at every step.

    Attributes:
        kind: ``TENSOR``, or the kind of a plain value.
        dtype, dims: dtype and number of dims of a tensor; its extents may change at every step.
        requires_grad: whether the tensor gets a gradient.
    """

    kind: int
    dtype: torch.dtype = torch.uint8
    dims: int = 0
    requires_grad: bool = False


class TensorSpec(NamedTuple):
    """Dtype, shape and size of a tensor that has not been received yet."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int


def write_value(out: bytearray, kind: int, value: Any) -> None:
    """Append a plain value."""
    if kind == BOOL:
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
    """Read the result of :func:`write_value`."""
    kind = leaf.kind
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


class Values:
    """Encoder of the values that change at every step: extents of tensors, then plain values.

    All extents are unsigned integers of the same size, which precedes them: 4 bytes, or 8 if any
    extent needs them.

    Args:
        leaves: leaves of a schema.
    """

    def __init__(self, leaves: Sequence[Leaf]) -> None:
        self._count = len(leaves)
        self._tensors = [
            (i, leaf.dtype, leaf.dims, leaf.dtype.itemsize)
            for i, leaf in enumerate(leaves)
            if leaf.kind == TENSOR
        ]
        self._plain = [(i, leaf) for i, leaf in enumerate(leaves) if leaf.kind != TENSOR]
        dims = sum(leaf.dims for leaf in leaves)
        self._extents = {4: struct.Struct(f"<B{dims}I"), 8: struct.Struct(f"<B{dims}Q")}

    def write(self, values: Sequence[Any]) -> bytes:
        """Encode plain values, and the extents of tensors."""
        extents: list[int] = []
        for i, _, _, _ in self._tensors:
            extents += values[i].shape
        size = 4 if max(extents, default=0) <= _MAX_NARROW else 8
        out = self._extents[size].pack(size, *extents)
        if not self._plain:
            return out
        rest = bytearray()
        for i, leaf in self._plain:
            write_value(rest, leaf.kind, values[i])
        return out + rest

    def read(self, data: bytes) -> list[Any]:
        """Decode the result of :meth:`write`, with a ``TensorSpec`` in place of each tensor.

        Raises:
            TransportError: if the bytes are not values of these leaves.
        """
        form = self._extents.get(data[0]) if data else None
        if form is None or len(data) < form.size:
            raise malformed(f"its {len(data)} bytes of values have no extents")
        _, *extents = form.unpack_from(data)
        values: list[Any] = [None] * self._count
        at = 0
        for i, dtype, dims, itemsize in self._tensors:
            shape = tuple(extents[at : at + dims])
            at += dims
            items = prod(shape)
            if not 0 < items <= _MAX_ITEMS:
                _check_extents(shape)
            values[i] = TensorSpec(dtype, shape, items * itemsize)
        reader = Reader(data[form.size :])
        for i, leaf in self._plain:
            values[i] = read_value(reader, leaf)
        reader.finish()
        return values


def _check_extents(shape: Sequence[int]) -> None:
    # Even an empty tensor has strides, which must fit into 64 bits.
    if prod([extent or 1 for extent in shape]) > _MAX_ITEMS:
        raise malformed(f"a tensor has the shape {list(shape)}, which is too large")
