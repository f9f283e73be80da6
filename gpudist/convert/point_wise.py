"""Functions that compute every cell from the same cells alone: right on blocks as they are."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from gpudist.convert.reshaping import joined_sizes
from gpudist.convert.values import Count, Extent, Extents, Pooled, Whole
from gpudist.errors import ConversionError
from gpudist.partition import CartesianPartition

_OPERATORS = "add sub mul truediv floordiv mod neg pow abs pos eq ne lt le gt ge and_ or_ invert"
_TORCH = (
    "add sub mul div neg abs exp log sqrt rsqrt square pow sin cos tan tanh sigmoid relu erf "
    "clamp clamp_min clamp_max where maximum minimum lerp addcmul sign floor ceil round reciprocal "
    "expm1 log1p logaddexp atan2 zeros_like ones_like nan_to_num"
)
_FUNCTIONAL = (
    "celu elu gelu hardshrink hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish relu relu6 "
    "selu sigmoid silu softplus softshrink softsign tanh tanhshrink threshold"
)
_TENSOR = (
    "bool double float half bfloat16 to type_as clone contiguous detach requires_grad_ "
    "add_ mul_ sub_ div_ clamp_ relu_ sigmoid_ tanh_ masked_fill eq ne lt le gt ge"
)

POINT_WISE_FUNCTIONS: frozenset[Any] = frozenset(
    getattr(room, name)
    for room, names in ((operator, _OPERATORS), (torch, _TORCH), (F, _FUNCTIONAL))
    for name in names.split()
) | {torch.relu_, F.relu_, torch.nn.functional.leaky_relu_}

POINT_WISE_METHODS: frozenset[str] = frozenset((*_TORCH.split(), *_TENSOR.split()))


def point_wise_output(arguments: Any) -> Any:
    """The value of a point-wise function of these.

    Raises:
        ConversionError: tensors are on different partitions, or a size of a block is used.
    """
    joined = joined_sizes(arguments[0]) if isinstance(arguments[0], tuple) else None
    if joined is not None:
        return joined
    values = list(_leaves(arguments))
    sizes = [value for value in values if isinstance(value, Extent | Extents | Count)]
    if any(_is_of_block(size) for size in sizes):
        raise ConversionError("the size of a block is used as a number")
    tensors = [value for value in values if isinstance(value, CartesianPartition)]
    wholes = [value for value in values if isinstance(value, Whole)]
    if sizes and not tensors and not wholes:
        return Count()
    if not tensors:
        raise ConversionError("it computes with parameters or buffers alone")
    if any(tensor != tensors[0] for tensor in tensors):
        shapes = [list(tensor.shape) for tensor in tensors]
        raise ConversionError(f"it combines tensors on different partitions, of shapes {shapes}")
    # One that was pooled is spread over the blocks of those that were not.
    output = next((tensor for tensor in tensors if not isinstance(tensor, Pooled)), tensors[0])
    for whole in wholes:
        _require_broadcast(whole, output)
    return output


def _is_of_block(size: Extent | Extents | Count) -> bool:
    """Whether it is another number on another worker."""
    if isinstance(size, Count):
        return False
    return isinstance(size, Extents) or size.P.shape[size.dim] > 1


def _require_broadcast(whole: Whole, P_x: CartesianPartition) -> None:
    """Refuse a parameter that has cells of its own along a dim that is split."""
    along = zip(reversed(whole.shape), reversed(P_x.shape), strict=False)
    if len(whole.shape) > P_x.dim or any(n > 1 and parts > 1 for n, parts in along):
        raise ConversionError(
            f"a parameter or buffer of shape {list(whole.shape)} is whole on every worker, and "
            f"does not fit blocks on a partition of shape {list(P_x.shape)}"
        )


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    else:
        yield value
