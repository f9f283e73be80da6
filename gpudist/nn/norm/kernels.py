"""Normalization of blocks on a GPU by the native core's kernels, in few passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from gpudist.exchange.autograd import is_eager
from gpudist.native import native as _native
from gpudist.nn.kernel_choice import NATIVE_FLOATS
from gpudist.nn.norm.normalization import Normalization, Parameters, Running, Summing
from gpudist.transport.nccl.streams import stream_of

if TYPE_CHECKING:
    from gpudist._native import DeviceNorm, Dtype

# Smallest block of channels on a GPU that takes the kernels though no other worker shares its
# statistics. On an H200 they are 2 to 37 times faster than torch's for 256 MiB in any layout but
# batch norm's of channels-last float32, and as fast for that; torch's take less host time.
UNSHARED_BYTES = 8 << 20
# Most lines, and most parameters.
_MOST_LINES = 2**31 - 1
_HAS_CUDA = _native is not None and not _native.device_missing()


class _BoundKernels(NamedTuple):
    """Kernels for blocks of one shape, dtype and layout.

    Attributes:
        norm: native object.
        workspace: size of the workspace, in float64 numbers.
        stream: returns the handle of torch's current stream.
        unguarded: normalization whose sums may be invalid after a failure, which the kernels that
            read them find at the address ``failed_word``.
    """

    norm: DeviceNorm
    workspace: int
    stream: Callable[[], int]
    unguarded: Normalization
    failed_word: int


def fits(
    normalization: Normalization,
    x: torch.Tensor,
    parameters: Parameters,
    dtype: torch.dtype | None = None,
) -> bool:
    """Return whether the kernels can normalize this block into ``dtype``, by default its own."""
    return (
        (
            normalization.total is not None
            or _is_large(normalization, x.numel(), x.dtype, x.device.type)
        )
        and (_HAS_CUDA if x.device.type == "cuda" else normalization.device_library != "")
        and is_eager(x)
        and x.dtype in NATIVE_FLOATS
        and (dtype in (None, x.dtype) or (dtype == torch.float32 and x.itemsize == 2))
        and x.numel() > 0
        and (x.numel() <= _MOST_LINES or _has_few_lines(normalization, x))
        and _are_alike(parameters, x)
        and (x.is_contiguous() or (normalization.per_channel and _is_by_columns(x)))
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


class ByKernels(Summing):
    """Normalization of one block on a GPU by the native core; requires :func:`fits`.

    Attributes:
        shifts: sums over all workers, whose means were subtracted from float64 values before they
            were summed; ``None`` if nothing was.

    Adjoint:
        The gradient is computed from the block, the sums and the weight.

    Cost:
        Two passes over the block in forward, which read it twice and write the output; two in
        backward, which read the block and the gradient twice and write a gradient. At most three
        launches each way besides the messages. Nothing of the block's size is kept but the block.
        A float64 block whose mean is subtracted is summed twice, in two more launches at most.
    """

    shifts: torch.Tensor | None = None

    def forward(
        self, x: torch.Tensor, *parameters: torch.Tensor
    ) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        by = self.normalization
        norm, size, current, unguarded, failed_word = _kernels_for(by, x, self.dtype)
        stream, at_x = current(), x.data_ptr()
        sums = torch.empty(by.sums_shape(x.shape), dtype=torch.float64, device=x.device)
        workspace = torch.empty(size, dtype=torch.float64, device=x.device)
        at_shifts = 0
        if x.dtype == torch.float64 and by.subtracts_mean:
            norm.sums(at_x, 0, sums.data_ptr(), workspace.data_ptr(), stream)
            self.shifts = by.sum_over_workers(sums)
            sums, at_shifts = torch.empty_like(sums), self.shifts.data_ptr()
        norm.sums(at_x, at_shifts, sums.data_ptr(), workspace.data_ptr(), stream)
        self.totals, moved = unguarded.move(sums, parameters)
        moved = [parameter.contiguous() for parameter in moved]
        y = torch.empty_like(x, dtype=self.dtype)
        running = _addresses_of_running(self.running)
        norm.normalize(
            at_x, self.totals.data_ptr(), at_shifts, _addresses(moved), y.data_ptr(), running,
            failed_word, stream,
        )  # fmt: skip
        if self.running is not None:
            torch.autograd.graph.increment_version([self.running.mean, self.running.variance])
        # Backward does not need the bias.
        return y, [self.totals, self.shifts, *moved[:1]]

    def backward(
        self,
        gradient: torch.Tensor,
        inputs: Sequence[torch.Tensor],
        kept: Sequence[Any],
        needs: Sequence[bool],
    ) -> list[torch.Tensor | None]:
        x, totals, shifts, weights = inputs[0], *kept[:2], kept[2:]
        norm, size, current, unguarded, failed_word = _kernels_for(
            self.normalization, x, self.dtype
        )
        gradient = gradient.contiguous() if x.is_contiguous() else _by_columns(gradient)
        of_sums = torch.empty_like(totals)
        workspace = torch.empty(size, dtype=torch.float64, device=x.device)
        own_sums = [
            torch.empty_like(weights[0]) if needed and weights else None for needed in needs[1:]
        ]
        at_shifts = 0 if shifts is None else shifts.data_ptr()
        at_x, at_gradient, at_totals = x.data_ptr(), gradient.data_ptr(), totals.data_ptr()
        weight, stream = _addresses(weights), current()
        norm.gradient_sums(
            at_gradient, at_x, at_totals, at_shifts, weight, of_sums.data_ptr(),
            _addresses(own_sums), workspace.data_ptr(), stream,
        )  # fmt: skip
        of_totals, of_parameters = unguarded.move_gradients(of_sums, own_sums, needs)
        of_x = None
        if of_totals is not None:
            of_x = torch.empty_like(x)
            norm.gradient(
                at_gradient, at_x, at_totals, at_shifts, of_totals.data_ptr(), weight,
                of_x.data_ptr(), failed_word, stream,
            )  # fmt: skip
        return [of_x, *of_parameters]


class DryPasses(Summing):
    """Normalization of a block without data, with the native core's passes and messages."""

    shifts = None

    def forward(
        self, x: torch.Tensor, *parameters: torch.Tensor
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        by = self.normalization
        # A pass over the block, and a kernel that adds its parts.
        sums = x.sum().double().new_empty(by.sums_shape(x.shape))
        self.totals, moved = by.move(sums, parameters)
        y = torch.neg(x) if self.dtype in (None, x.dtype) else x.to(self.dtype)
        return y, [self.totals, *moved[:1]]

    def backward(
        self,
        gradient: torch.Tensor,
        inputs: Sequence[torch.Tensor],
        kept: Sequence[torch.Tensor],
        needs: Sequence[bool],
    ) -> list[torch.Tensor | None]:
        by, x, totals = self.normalization, inputs[0], kept[0]
        # A pass over both, and a kernel that adds its parts.
        for read in (gradient, x):
            read.sum()
        own_sums = [
            torch.empty_like(kept[1]) if needed and kept[1:] else None for needed in needs[1:]
        ]
        of_totals, of_parameters = by.move_gradients(torch.empty_like(totals), own_sums, needs)
        of_x = None if of_totals is None else torch.add(gradient, x)
        return [of_x, *of_parameters]


def by_kernels(
    normalization: Normalization,
    x: torch.Tensor,
    running: Running | None = None,
    dtype: torch.dtype | None = None,
) -> ByKernels | DryPasses:
    """Return the normalization of a block by the kernels; requires :func:`fits`."""
    return (DryPasses if x.is_meta else ByKernels)(normalization, running, dtype)


def can_update(running: Running, x: torch.Tensor) -> bool:
    """Return whether the kernels for block ``x`` can update these running moments."""
    mean, variance = running.mean, running.variance
    return (
        _can_read_parameters(mean.dtype, x)
        and mean.dtype == variance.dtype
        and mean.is_contiguous()
        and variance.is_contiguous()
    )


def _can_read_parameters(of_parameters: torch.dtype, x: torch.Tensor) -> bool:
    is_double = of_parameters == torch.float64
    return of_parameters in NATIVE_FLOATS and is_double == (x.dtype == torch.float64)


def _are_alike(parameters: Parameters, x: torch.Tensor) -> bool:
    dtype = None
    for parameter in parameters:
        if parameter is None or parameter.dtype != (dtype or parameter.dtype):
            return False
        dtype = parameter.dtype
    return dtype is None or _can_read_parameters(dtype, x)


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


def _is_by_columns(x: torch.Tensor) -> bool:
    return x.movedim(1, -1).is_contiguous()


def _by_columns(x: torch.Tensor) -> torch.Tensor:
    return x if _is_by_columns(x) else x.movedim(1, -1).contiguous().movedim(-1, 1)


def _addresses(tensors: Sequence[torch.Tensor | None]) -> tuple[int, int, Dtype]:
    # 0 stands for no tensor.
    dtype, addresses = torch.float32, [0, 0]
    for i, x in enumerate(tensors):
        if x is not None:
            dtype, addresses[i] = x.dtype, x.data_ptr()
    return addresses[0], addresses[1], NATIVE_FLOATS[dtype]


def _addresses_of_running(running: Running | None) -> tuple[int, int, int, float, Dtype]:
    if running is None:
        return 0, 0, 0, 0.0, NATIVE_FLOATS[torch.float32]
    mean, variance, factor = running
    by_count = isinstance(factor, torch.Tensor)
    batches, momentum = (factor.data_ptr(), 0.0) if by_count else (0, factor)
    return mean.data_ptr(), variance.data_ptr(), batches, momentum, NATIVE_FLOATS[mean.dtype]


def _kernels_for(
    normalization: Normalization, x: torch.Tensor, dtype: torch.dtype | None
) -> _BoundKernels:
    key = (x.dtype, dtype, x.device, x.is_contiguous())
    kernels = normalization.native.get(key)
    if kernels is None:
        kernels = normalization.native[key] = _bind(normalization, x, dtype or x.dtype)
    return kernels


def _bind(by: Normalization, x: torch.Tensor, dtype: torch.dtype) -> _BoundKernels:
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
    norm = _native.DeviceNorm(
        "" if is_gpu else by.device_library,
        device, walk, NATIVE_FLOATS[x.dtype], NATIVE_FLOATS[dtype], outer, channels, cells, groups,
        size, offset, shares_outer, max(1, by.cells), by.eps, by.subtracts_mean,
    )  # fmt: skip
    unguarded, failed_word = by, 0
    if by.total is not None:
        unguarded = replace(by, total=by.total.unguarded)
        failed_word = by.total.steps[0].partition.wire.failed_word
    return _BoundKernels(norm, norm.workspace, stream_of(x.device), unguarded, failed_word)
