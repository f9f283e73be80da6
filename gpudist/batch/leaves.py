"""Leaves of a batch: tensors, numbers, strings and bytes, and how each is encoded."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch

from gpudist.batch.packing import batch_error, decode_values, encode_values

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

PLAIN = frozenset((type(None), bool, int, float, complex, str, bytes))

MAX_DIMS = 64
_MAX_ITEMS = 1 << 60
_MAX_NARROW = (1 << 32) - 1


@dataclass(frozen=True)
class TensorLeaf:
    """Properties of a tensor that are the same at every step; its extents may change.

    Attributes:
        dtype, dims: dtype and number of dims.
        requires_grad: whether the tensor gets a gradient.
    """

    dtype: torch.dtype
    dims: int
    requires_grad: bool


# ``None`` stands for a plain value of any type.
Leaf = TensorLeaf | None


class TensorSpec(NamedTuple):
    """Dtype, shape and size of a tensor that has not been received yet."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int


class Values:
    """Encoder of the values that change at every step: extents, then plain values in msgpack.

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
            if leaf is not None
        ]
        self._plain = [i for i, leaf in enumerate(leaves) if leaf is None]
        dims = sum(leaf.dims for leaf in leaves if leaf is not None)
        self._extents = {4: struct.Struct(f"<B{dims}I"), 8: struct.Struct(f"<B{dims}Q")}

    def write(self, values: Sequence[Any]) -> bytes:
        """Encode plain values, and the extents of tensors."""
        extents: list[int] = []
        for i, _, _, _ in self._tensors:
            extents += values[i].shape
        size = 4 if max(extents, default=0) <= _MAX_NARROW else 8
        out = self._extents[size].pack(size, *extents)
        return out + encode_values([values[i] for i in self._plain]) if self._plain else out

    def read(self, data: bytes) -> list[Any]:
        """Decode the result of :meth:`write`, with a ``TensorSpec`` in place of each tensor.

        Raises:
            TransportError: if the bytes are not values of these leaves.
        """
        form = self._extents.get(data[0]) if data else None
        if form is None or len(data) < form.size:
            raise batch_error(f"its {len(data)} bytes of values have no extents")
        _, *extents = form.unpack_from(data)
        values: list[Any] = [None] * self._count
        at = 0
        for i, dtype, dims, itemsize in self._tensors:
            shape = tuple(extents[at : at + dims])
            at += dims
            items = prod(shape)
            if not 0 < items <= _MAX_ITEMS:
                _check_size(shape)
            values[i] = TensorSpec(dtype, shape, items * itemsize)
        if not self._plain and len(data) == form.size:
            return values
        plain = decode_values(data[form.size :])
        if type(plain) is not tuple or not PLAIN.issuperset(map(type, plain)):
            raise batch_error("its plain values are of other types")
        if len(plain) != len(self._plain):
            raise batch_error(f"it has {len(plain)} plain values, expected {len(self._plain)}")
        for i, value in zip(self._plain, plain, strict=True):
            values[i] = value
        return values


def _check_size(shape: Sequence[int]) -> None:
    # Even an empty tensor has strides, which must fit into 64 bits.
    if prod([extent or 1 for extent in shape]) > _MAX_ITEMS:
        raise batch_error(f"a tensor has the shape {list(shape)}, which is too large")
