"""What becomes of the functions that a forward calls on tensors that are cut into blocks."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from gpudist import nn
from gpudist.convert.inserted import InterpolationLike, PermutedDims, RepartitionedFlatten
from gpudist.convert.layers import pools_to_one
from gpudist.convert.plan import Shape
from gpudist.convert.reshaping import FUNCTIONS as RESHAPING_FUNCTIONS
from gpudist.convert.reshaping import METHODS as RESHAPING_METHODS
from gpudist.convert.reshaping import reshaped_blocks
from gpudist.convert.values import (
    Extent,
    Extents,
    Pooled,
    permuted,
    resized,
    split_dims,
    with_shape,
    without_dims,
)
from gpudist.errors import ConversionError
from gpudist.partition import CartesianPartition

P = CartesianPartition


@dataclass
class Call:
    """A function called in a forward; rules say what becomes of it.

    Attributes:
        node: of the first argument.
        arguments: nodes of those given by position.
        grid: to which the plan moves the input, ``None`` for the choice of the rule.
        follows_mode: whether its arguments are others in training than in evaluation.
        training: whether they are those of training.
        module: to call instead; ``None`` where the function itself is right on blocks.
        inputs: nodes of the arguments of ``module``, ``node`` alone unless said.
        repartition: shape of the partition to which the input was moved.
    """

    node: Any
    grid: CartesianPartition | None = None
    follows_mode: bool = False
    training: bool = True
    arguments: tuple[Any, ...] = ()
    module: torch.nn.Module | None = None
    inputs: tuple[Any, ...] = field(default=())
    repartition: Shape | None = None

    def instead(self, module: torch.nn.Module, output: Any, *inputs: Any) -> Any:
        """Call ``module``, of these nodes, which gives ``output``."""
        self.module, self.inputs = module, inputs or (self.node,)
        return output


def flattened(call: Call, x: P, start_dim: int = 0, end_dim: int = -1) -> P:
    """``torch.flatten``: of dims that are whole, for which the batch is split if it must."""
    start, end = start_dim % x.dim, end_dim % x.dim
    dims = range(start, end + 1)
    if call.grid is None and all(x.shape[dim] == 1 for dim in dims):
        return without_dims(x, dims[1:])
    if start == 0 and call.grid is None:
        raise ConversionError("dims are flattened together with the batch, which is split")
    P_y = call.grid or with_shape(x, (x.size, *(1,) * (x.dim - 1)))
    if any(P_y.shape[dim] > 1 for dim in dims):
        raise ConversionError(
            f"dims {start} to {end} are flattened, which a partition of shape {list(P_y.shape)} "
            "splits"
        )
    call.repartition = P_y.shape
    return call.instead(RepartitionedFlatten(x, P_y, start, end), without_dims(P_y, dims[1:]))


def _reshaped(call: Call, x: P, *shape: Any) -> P:
    """``view`` and ``reshape`` to ``(batch, -1)``, which flattens, or that keep split dims."""
    sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], Sequence) else shape
    keeps_batch = len(sizes) == 2 and (
        (isinstance(sizes[0], Extent) and sizes[0].dim == 0 and isinstance(sizes[1], int))
        or (sizes[0] == -1 and isinstance(sizes[1], int))
    )
    if not keeps_batch and call.grid is None:
        return reshaped_blocks(call, x, sizes)
    if not keeps_batch:
        raise ConversionError("only a reshape to (batch, -1) moves its input")
    return flattened(call, x, 1)


def _sliding(name: str) -> Callable[..., P]:
    """A pool, from the arguments of torch's function."""

    def rule(call: Call, x: P, kernel_size: Any, stride: Any = None, *args: Any, **options: Any):
        module = getattr(nn, name)(x, kernel_size, stride or None, *args, **options)
        return call.instead(module, resized(x))

    return rule


def _max_pool(name: str) -> Callable[..., P]:
    """A maximum pool without indices: with them torch calls a function that has no rule."""
    pool = _sliding(name)

    def rule(
        call: Call,
        x: P,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> P:
        options = {"padding": padding, "dilation": dilation, "ceil_mode": ceil_mode}
        return pool(call, x, kernel_size, stride, **options)

    return rule


def _adaptive(name: str) -> Callable[..., P]:
    def rule(call: Call, x: P, output_size: Any, return_indices: bool = False) -> P:
        output = Pooled.of(x) if pools_to_one(output_size) else resized(x)
        return call.instead(getattr(nn, name)(x, output_size), output)

    return rule


def _interpolated(
    call: Call,
    x: P,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> P:
    if antialias:
        raise ConversionError("antialias is not supported")
    options = {"mode": mode, "align_corners": align_corners}
    if isinstance(size, Extents):
        if size.dims != tuple(range(2, x.dim)):
            raise ConversionError("the size is of another number of dims")
        like = InterpolationLike(x, size.P, **options)
        return call.instead(like, resized(x), call.node, size.node)
    layer = nn.DistributedUpsample(
        x, size, scale_factor, recompute_scale_factor=recompute_scale_factor, **options
    )
    return call.instead(layer, resized(x))


_PADS = {
    "constant": "ConstantPad",
    "reflect": "ReflectionPad",
    "replicate": "ReplicationPad",
    "circular": "CircularPad",
}


def _padded(call: Call, x: P, pad: Any, mode: str = "constant", value: float | None = None) -> P:
    dims = x.dim - 2
    if len(pad) > 2 * dims or mode not in _PADS:
        raise ConversionError(f"padding {list(pad)} of mode {mode!r} is not supported")
    widths = (*pad, *(0,) * (2 * dims - len(pad)))
    arguments = (value or 0.0,) if mode == "constant" else ()
    layer = getattr(nn, f"Distributed{_PADS[mode]}{dims}d")(x, widths, *arguments)
    return call.instead(layer, resized(x))


def _mean(call: Call, x: P, dim: Any = None, keepdim: bool = False) -> P:
    """A mean over dims that are whole, or over all spatial dims."""
    dims = _dims_of(x, dim)
    if not set(dims) & set(split_dims(x)):
        return x if keepdim else without_dims(x, dims)
    if dims != list(range(2, x.dim)):
        raise ConversionError(f"the mean over dims {dims} of {list(x.shape)} is not supported")
    pool = getattr(nn, f"DistributedAdaptiveAvgPool{x.dim - 2}d")(x, 1)
    if keepdim:
        return call.instead(pool, Pooled.of(x))
    output = flattened(call, x, 1)
    assert call.module is not None
    return call.instead(torch.nn.Sequential(pool, call.module), output)


def _reduced(call: Call, x: P, dim: Any = None, keepdim: bool = False) -> P:
    """A reduction over dims that are whole, which is one of every block."""
    dims = _dims_of(x, dim)
    if set(dims) & set(split_dims(x)):
        raise ConversionError(f"dims {dims} are reduced, but {split_dims(x)} are split")
    return x if keepdim else without_dims(x, dims)


def _dims_of(x: P, dim: Any) -> list[int]:
    dims = range(x.dim) if dim is None else (dim,) if isinstance(dim, int) else dim
    return sorted(d % x.dim for d in dims)


def _softmax(name: str) -> Callable[..., P]:
    def rule(call: Call, x: P, dim: int | None = None, **_: Any) -> P:
        return call.instead(getattr(nn, name)(x, dim), x)

    return rule


def _dropped(name: str) -> Callable[..., P]:
    def rule(call: Call, x: P, p: float = 0.5, training: bool = True, inplace: bool = False) -> P:
        if not call.follows_mode:
            raise ConversionError(f"dropout with training={training} in training and evaluation")
        return call.instead(getattr(nn, name)(x, p), x)

    return rule


def _joined(call: Call, tensors: Sequence[P], dim: int = 0) -> P:
    x = tensors[0]
    if any(other != x for other in tensors):
        shapes = [list(other.shape) for other in tensors]
        raise ConversionError(f"tensors on different partitions, {shapes}, are concatenated")
    if len({isinstance(other, Pooled) for other in tensors}) > 1:
        raise ConversionError("a tensor that was pooled to one cell is concatenated with others")
    if x.shape[dim] > 1:
        raise ConversionError(f"they join along dim {dim % x.dim}, which {list(x.shape)} splits")
    return x


def _chunks(call: Call, x: P, chunks: int, dim: int = 0) -> list[P]:
    if x.shape[dim] > 1:
        raise ConversionError(f"dim {dim % x.dim} of {list(x.shape)} is cut up, which is split")
    return [x] * chunks


def _permuted(call: Call, x: P, *dims: Any) -> P:
    given = dims[0] if len(dims) == 1 and isinstance(dims[0], Sequence) else dims
    order = [dim % x.dim for dim in given]
    if isinstance(x, Pooled):
        raise ConversionError("a tensor that was pooled to one cell is permuted")
    return call.instead(PermutedDims(x, order), permuted(x, order))


def _transposed(call: Call, x: P, dim0: int, dim1: int) -> P:
    order = list(range(x.dim))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return _permuted(call, x, order)


def _attribute(call: Call, x: P, name: str) -> Any:
    if name == "shape":
        return Extents(x, call.node, tuple(range(x.dim)))
    if name == "ndim":
        return x.dim
    if name in ("dtype", "device"):
        return None
    raise ConversionError(f"the attribute {name} of a tensor is not supported")


def _size(call: Call, x: P, dim: int | None = None) -> Any:
    extents = Extents(x, call.node, tuple(range(x.dim)))
    return extents if dim is None else Extent(x, call.node, dim % x.dim)


def _item(call: Call, x: Any, key: Any) -> Any:
    """Of extents, of a list of tensors, or cells along dims that are whole."""
    if isinstance(x, Extents):
        if isinstance(key, slice):
            return Extents(x.P, x.node, x.dims[key])
        return Extent(x.P, x.node, x.dims[key])
    if not isinstance(x, CartesianPartition):
        return x[key]
    keys = key if isinstance(key, tuple) else (key,)
    if Ellipsis in keys:
        at = keys.index(Ellipsis)
        keys = (*keys[:at], *(slice(None),) * (x.dim - len(keys) + 1), *keys[at + 1 :])
    for dim, k in enumerate(keys):
        bounds = (k.start, k.stop, k.step) if isinstance(k, slice) else (k,)
        if not all(isinstance(bound, int | None) for bound in bounds) or k is None:
            raise ConversionError(f"the index {k!r} is not supported")
        if x.shape[dim] > 1 and k != slice(None):
            raise ConversionError(f"cells are taken along dim {dim}, which is split")
    lost = [dim for dim, k in enumerate(keys) if isinstance(k, int)]
    return without_dims(x, lost) if lost else x


def _named(stem: str, rule_of: Callable[[str], Any], *functions: Any) -> dict[Any, Any]:
    """The rule for functions of one, two and three dims."""
    return {
        function: rule_of(f"Distributed{stem}{d}d")
        for d, same in enumerate(functions, 1)
        for function in same
    }


FUNCTIONS: dict[Any, Callable[..., Any]] = {
    **RESHAPING_FUNCTIONS,
    **_named(
        "MaxPool",
        _max_pool,
        (F.max_pool1d, torch.max_pool1d),
        (F.max_pool2d, torch.max_pool2d),
        (F.max_pool3d, torch.max_pool3d),
    ),
    **_named("AvgPool", _sliding, (F.avg_pool1d,), (F.avg_pool2d,), (F.avg_pool3d,)),
    **_named(
        "AdaptiveAvgPool",
        _adaptive,
        (F.adaptive_avg_pool1d,),
        (F.adaptive_avg_pool2d,),
        (F.adaptive_avg_pool3d,),
    ),
    **_named(
        "AdaptiveMaxPool",
        _adaptive,
        (F.adaptive_max_pool1d,),
        (F.adaptive_max_pool2d,),
        (F.adaptive_max_pool3d,),
    ),
    **_named("Dropout", _dropped, (F.dropout1d,), (F.dropout2d,), (F.dropout3d,)),
    F.dropout: _dropped("DistributedDropout"),
    F.interpolate: _interpolated,
    F.pad: _padded,
    F.softmax: _softmax("DistributedSoftmax"),
    F.log_softmax: _softmax("DistributedLogSoftmax"),
    torch.softmax: _softmax("DistributedSoftmax"),
    torch.log_softmax: _softmax("DistributedLogSoftmax"),
    torch.flatten: flattened,
    torch.reshape: _reshaped,
    torch.mean: _mean,
    torch.sum: _reduced,
    torch.amax: _reduced,
    torch.amin: _reduced,
    torch.cat: _joined,
    torch.concat: _joined,
    torch.chunk: _chunks,
    torch.permute: _permuted,
    torch.transpose: _transposed,
    getattr: _attribute,
    operator.getitem: _item,
}

# These move their input themselves.
MOVING = frozenset({flattened, _reshaped, _mean})
# The blocks of these lie beside each other, so that none is spread over those of others.
JOINING = frozenset({torch.cat, torch.concat})

DROPOUTS = frozenset(
    {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.scaled_dot_product_attention}
)

METHODS: dict[str, Callable[..., Any]] = {
    **RESHAPING_METHODS,
    "flatten": flattened,
    "view": _reshaped,
    "reshape": _reshaped,
    "mean": _mean,
    "sum": _reduced,
    "amax": _reduced,
    "amin": _reduced,
    "softmax": _softmax("DistributedSoftmax"),
    "log_softmax": _softmax("DistributedLogSoftmax"),
    "chunk": _chunks,
    "permute": _permuted,
    "transpose": _transposed,
    "size": _size,
    "dim": lambda call, x: x.dim,
}
