"""Normalization of blocks on a GPU by the native core's kernels, in few passes."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

import torch

from gpudist.exchange.autograd import is_eager
from gpudist.native import native as _native
from gpudist.nn.kernel_choice import NATIVE_FLOATS
from gpudist.nn.norm.normalization import Normalization, Parameters, Running
from gpudist.nn.norm.passes import BoundNorm, is_by_columns

if TYPE_CHECKING:
    from gpudist._native import DeviceNorm

# Smallest block of channels on a GPU that takes the kernels though no other worker shares its
# statistics. On an H200 they are 2 to 37 times faster than torch's for 256 MiB in any layout but
# batch norm's of channels-last float32, and as fast for that; torch's take less host time.
UNSHARED_BYTES = 8 << 20
# Most lines, and most parameters.
_MOST_LINES = 2**31 - 1
_HAS_CUDA = _native is not None and not _native.device_missing()


def bound_norm(
    normalization: Normalization,
    x: torch.Tensor,
    parameters: Parameters,
    dtype: torch.dtype | None = None,
) -> BoundNorm | None:
    """Return the normalization of this block into ``dtype``, ``None`` unless it :func:`fits`.

    Cost:
        Two passes over the block in forward, which read it twice and write the output; two in
        backward, which read the block and the gradient twice and write a gradient. At most three
        launches each way besides the messages. Nothing of the block's size is kept but the block.
        A float64 block whose mean is subtracted is summed twice, in two more launches at most.
    """
    may_run = _HAS_CUDA if x.device.type == "cuda" else normalization.device_library != ""
    if not may_run or not is_eager(x):
        return None
    dtypes = [parameter is not None and parameter.dtype for parameter in parameters]
    key = (x.stride(), x.dtype, x.device, dtype, *dtypes)
    bound = normalization.native.get(key)
    if bound is None:
        bound = False
        if fits(normalization, x, parameters, dtype):
            result = dtype or x.dtype
            native = None if x.is_meta else _bind(normalization, x, result)
            bound = BoundNorm(normalization, x, parameters, result, native, on_gpu=True)
        normalization.native[key] = bound
    return bound or None


def fits(
    normalization: Normalization,
    x: torch.Tensor,
    parameters: Parameters,
    dtype: torch.dtype | None = None,
) -> bool:
    """Return whether kernels of a GPU normalize this block into ``dtype``, by default its own."""
    return (
        (
            normalization.total is not None
            or _is_large(normalization, x.numel(), x.dtype, x.device.type)
        )
        and x.dtype in NATIVE_FLOATS
        and (dtype in (None, x.dtype) or (dtype == torch.float32 and x.itemsize == 2))
        and x.numel() > 0
        and (x.numel() <= _MOST_LINES or _has_few_lines(normalization, x))
        and _are_alike(parameters, x)
        and (x.is_contiguous() or (normalization.per_channel and is_by_columns(x)))
    )


def never_fit(
    normalization: Normalization, shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> bool:
    """Return whether torch's function computes every such block, because :func:`fits` is false.

    These blocks have cells, share no statistics, and are small.
    """
    cells = prod(shape)
    is_large = _is_large(normalization, cells, dtype, device.type)
    return normalization.total is None and cells > 0 and not is_large


def can_update(running: Running, x: torch.Tensor) -> bool:
    """Return whether the kernels for block ``x`` can update these running moments."""
    mean, variance = running.mean, running.variance
    return (
        _can_read_parameters(mean.dtype, x)
        and mean.dtype == variance.dtype
        and mean.is_contiguous()
        and variance.is_contiguous()
    )


def _can_read_parameters(of_parameters: torch.dtype | bool, x: torch.Tensor) -> bool:
    is_double = of_parameters == torch.float64
    return of_parameters in NATIVE_FLOATS and is_double == (x.dtype == torch.float64)


def _are_alike(parameters: Parameters, x: torch.Tensor) -> bool:
    dtypes = {parameter is not None and parameter.dtype for parameter in parameters}
    return not dtypes or (len(dtypes) == 1 and _can_read_parameters(dtypes.pop(), x))


def _is_large(by: Normalization, cells: int, dtype: torch.dtype, device: str) -> bool:
    if UNSHARED_BYTES == 0:
        return True
    # Of float64 they have not been measured.
    is_gpu = by.per_channel and device == "cuda" and dtype != torch.float64
    return is_gpu and cells * dtype.itemsize >= UNSHARED_BYTES


def _has_few_lines(by: Normalization, x: torch.Tensor) -> bool:
    if by.per_channel:
        return x.shape[0] * x.shape[1] <= _MOST_LINES
    return max(prod(x.shape[: by.dims[0]]), prod(x.shape[by.dims[0] :])) <= _MOST_LINES


def _bind(by: Normalization, x: torch.Tensor, dtype: torch.dtype) -> DeviceNorm:
    is_gpu = x.device.type == "cuda"
    device = x.device.index if is_gpu else 0
    shares_outer = by.per_channel and by.groups is None and 0 in by.dims
    outer, channels = prod(x.shape[: by.dims[0]]), 1
    cells = prod(x.shape[by.dims[0] :])
    walk = _native.NormWalk.cells
    if by.per_channel:
        outer, channels, cells = x.shape[0], x.shape[1], prod(x.shape[2:])
        by_columns = not x.is_contiguous() or (cells == 1 and shares_outer)
        walk = _native.NormWalk.columns if by_columns else _native.NormWalk.rows
        if by_columns and shares_outer:
            outer, cells = 1, outer * cells
    groups, size, offset = channels, 1, 0
    if by.groups is not None:
        groups, size, offset = by.group_count, by.group_size, by.group_offset
    return _native.DeviceNorm(
        "" if is_gpu else by.device_library,
        device, walk, NATIVE_FLOATS[x.dtype], NATIVE_FLOATS[dtype], outer, channels, cells, groups,
        size, offset, shares_outer, max(1, by.cells), by.eps, by.subtracts_mean,
    )  # fmt: skip
