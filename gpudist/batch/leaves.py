"""Leaves of a batch: tensors, numbers, strings and bytes, and how each is encoded."""

from __future__ import annotations

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
_INTEGERS = frozenset((int,))


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
    """Encoder of the values that change at every step: all extents, then all plain values.

    Args:
        leaves: leaves of a schema.
    """

    def __init__(self, leaves: Sequence[Leaf]) -> None:
        tensors = [(i, leaf) for i, leaf in enumerate(leaves) if leaf is not None]
        self._tensors = [(i, x.dtype, x.dims, x.dtype.itemsize) for i, x in tensors]
        self._plain = [i for i, leaf in enumerate(leaves) if leaf is None]
        self._dims = sum([leaf.dims for _, leaf in tensors])
        self._count = len(leaves)

    def write(self, values: Sequence[Any]) -> bytes:
        """Encode plain values, and the extents of tensors."""
        extents: list[int] = []
        for i, _, _, _ in self._tensors:
            extents += values[i].shape
        return encode_values((extents, [values[i] for i in self._plain]))

    def read(self, data: bytes) -> list[Any]:
        """Decode the result of :meth:`write`, with a ``TensorSpec`` in place of each tensor.

        Raises:
            TransportError: if the bytes are not values of these leaves.
        """
        match decode_values(data):
            case (tuple(extents), tuple(plain)) if len(extents) == self._dims:
                pass
            case _:
                raise batch_error(f"its {len(data)} bytes of values are not of its structure")
        if not _INTEGERS.issuperset(map(type, extents)) or min(extents, default=0) < 0:
            raise batch_error(f"its tensors have the extents {extents}")
        if not PLAIN.issuperset(map(type, plain)) or len(plain) != len(self._plain):
            raise batch_error(f"its {len(plain)} plain values are too many, too few or of no type")
        values: list[Any] = [None] * self._count
        at = 0
        for i, dtype, dims, itemsize in self._tensors:
            shape = extents[at : at + dims]
            at += dims
            items = prod(shape)
            if not 0 < items <= _MAX_ITEMS:
                _check_size(shape)
            values[i] = TensorSpec(dtype, shape, items * itemsize)
        for i, value in zip(self._plain, plain, strict=True):
            values[i] = value
        return values


def _check_size(shape: Sequence[int]) -> None:
    # Even an empty tensor has strides, which must fit into 64 bits.
    if prod([extent or 1 for extent in shape]) > _MAX_ITEMS:
        raise batch_error(f"a tensor has the shape {list(shape)}, which is too large")
