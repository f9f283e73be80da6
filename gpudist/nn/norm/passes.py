"""Normalization of a block by passes of the native core, bound once, as one autograd node."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from gpudist.exchange.autograd import (
    eager_apply,
    gradients_of_composition,
    increment_versions,
)
from gpudist.exchange.carry import execution_of
from gpudist.nn.kernel_choice import NATIVE_FLOATS
from gpudist.nn.norm.normalization import Normalization, Parameters
from gpudist.transport.nccl.streams import stream_of


class BoundNorm:
    """Normalization of blocks of one shape, dtype and layout, with everything looked up.

    Args:
        by: the normalization.
        x: a block.
        parameters: weight and bias, or as many as there are.
        dtype: dtype of the normalized block.
        native: passes over a block, given addresses; ``None`` for blocks without data.
        on_gpu: whether the passes are kernels. They may update running moments, and find invalid
            sums themselves, by the word that the transport sets after a failure.
        empty_like: returns a new tensor like a block.

    Adjoint:
        The gradient is computed from the block, the sums and the weight.
    """

    def __init__(
        self,
        by: Normalization,
        x: torch.Tensor,
        parameters: Parameters,
        dtype: torch.dtype,
        native: Any,
        on_gpu: bool,
        empty_like: Callable[..., torch.Tensor] = torch.empty_like,
    ) -> None:
        self.by, self.native, self.dtype, self.on_gpu = by, native, dtype, on_gpu
        self.empty_like, self.stream = empty_like, stream_of(x.device)
        self.device, self.strides, self.is_contiguous = x.device, x.stride(), x.is_contiguous()
        self.sums_shape = by.sums_shape(x.shape)
        # Of float64 values, the mean over all workers is subtracted before they are summed.
        self.sums_twice = x.dtype == torch.float64 and by.subtracts_mean
        given = [parameter.dtype for parameter in parameters if parameter is not None]
        self.of_parameters = NATIVE_FLOATS[given[0] if given else torch.float32]
        self.unguarded, self.failed_word = by, 0
        if on_gpu and native is not None and by.total is not None:
            self.unguarded = replace(by, total=by.total.unguarded)
            self.failed_word = by.total.steps[0].partition.wire.failed_word

    @cached_property
    def carry(self) -> Callable[..., Any] | None:
        """Sum over workers; ``None`` if parameters move with the sums, or nothing moves."""
        total = self.unguarded.total
        return None if total is None or any(self.by.parameters) else execution_of(total)

    @cached_property
    def carry_back(self) -> Callable[..., Any] | None:
        """Adjoint of :attr:`carry`."""
        total = self.unguarded.total
        return None if total is None or self.carry is None else execution_of(total.T)

    def compose(self, x: torch.Tensor, *parameters: torch.Tensor | None) -> torch.Tensor:
        return self.by.compose(x.to(self.dtype), parameters).y


class _BlockNode(torch.autograd.Function):
    # It runs once for each norm of a network, so it calls nothing of ours but the native core.
    # The workspaces are of one call: two streams, or a graph and a stream, may run it at once.
    # They are named, because a kernel uses them after ``data_ptr`` returns.

    @staticmethod
    def forward(
        ctx: Any,
        bound: BoundNorm,
        seen: list[Any] | None,
        running: tuple[torch.Tensor, torch.Tensor, float, torch.Tensor | None] | None,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        native, stream, at_x = bound.native, bound.stream(), x.data_ptr()
        sums = torch.empty(bound.sums_shape, dtype=torch.float64, device=bound.device)
        workspace = torch.empty(native.workspace, dtype=torch.float64, device=bound.device)
        at_workspace, shifts, at_shifts = workspace.data_ptr(), None, 0
        if bound.sums_twice:
            native.sums(at_x, 0, sums.data_ptr(), at_workspace, stream)
            shifts = bound.by.sum_over_workers(sums)
            sums, at_shifts = torch.empty_like(sums), shifts.data_ptr()
        native.sums(at_x, at_shifts, sums.data_ptr(), at_workspace, stream)
        scale, shift = weight, bias
        if bound.carry is not None:
            (totals,) = bound.carry((sums,))
        else:
            given = [parameter for parameter in (weight, bias) if parameter is not None]
            totals, moved = bound.unguarded.move(sums, given)
            scale, shift = [*(parameter.contiguous() for parameter in moved), None, None][:2]
        y = bound.empty_like(x, dtype=bound.dtype)
        # The address 0 stands for no tensor.
        at_weight = 0 if scale is None else scale.data_ptr()
        at_bias = 0 if shift is None else shift.data_ptr()
        moments = 0, 0, 0, 0.0, bound.of_parameters
        if running is not None:
            mean, variance, momentum, batches = running
            at_batches = 0 if batches is None else batches.data_ptr()
            dtype = NATIVE_FLOATS[mean.dtype]
            moments = mean.data_ptr(), variance.data_ptr(), at_batches, momentum, dtype
        native.normalize(
            at_x, totals.data_ptr(), at_shifts, (at_weight, at_bias, bound.of_parameters),
            y.data_ptr(), moments, bound.failed_word, stream,
        )  # fmt: skip
        if running is not None:
            increment_versions(running[:2])
        if seen is not None:
            seen += totals, shifts
        ctx.bound = bound
        # As ``save_for_backward`` does, without its call. Backward does not need the moved bias.
        ctx.to_save = x, weight, bias, totals, shifts, scale
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # Before any message: reading saved tensors may make checkpointing recompute the forward.
        x, weight, bias, totals, shifts, scale = ctx.saved_tensors
        bound, needs = ctx.bound, ctx.needs_input_grad[3:]
        if torch.is_grad_enabled():
            inputs = x, weight, bias
            return None, None, None, *gradients_of_composition(bound, inputs, needs, gradient)
        if x.stride() != bound.strides:
            # Hooks of saved tensors may return another layout.
            x = x.new_empty_strided(x.shape, bound.strides).copy_(x)
        gradient = gradient.contiguous() if bound.is_contiguous else by_columns(gradient)
        native, stream = bound.native, bound.stream()
        of_sums = torch.empty_like(totals)
        of_weight = torch.empty_like(scale) if needs[1] else None
        of_bias = torch.empty_like(scale) if needs[2] else None
        workspace = torch.empty(native.workspace, dtype=torch.float64, device=bound.device)
        at_gradient, at_x, at_totals = gradient.data_ptr(), x.data_ptr(), totals.data_ptr()
        at_shifts = 0 if shifts is None else shifts.data_ptr()
        at_scale = 0 if scale is None else scale.data_ptr(), 0, bound.of_parameters
        at_weight = 0 if of_weight is None else of_weight.data_ptr()
        at_bias = 0 if of_bias is None else of_bias.data_ptr()
        native.gradient_sums(
            at_gradient, at_x, at_totals, at_shifts, at_scale, of_sums.data_ptr(),
            (at_weight, at_bias, bound.of_parameters), workspace.data_ptr(), stream,
        )  # fmt: skip
        of_x, of_totals = None, None
        if bound.carry_back is None:
            of_totals, (of_weight, of_bias) = bound.unguarded.move_gradients(
                of_sums, (of_weight, of_bias), needs
            )
        elif needs[0]:
            (of_totals,) = bound.carry_back((of_sums,))
        if of_totals is not None:
            of_x = bound.empty_like(x)
            native.gradient(
                at_gradient, at_x, at_totals, at_shifts, of_totals.data_ptr(), at_scale,
                of_x.data_ptr(), bound.failed_word, stream,
            )  # fmt: skip
        return None, None, None, of_x, of_weight, of_bias


# Normalizes a block, for which :func:`is_eager` is true, with contiguous parameters; the arguments
# are those of the node.
apply_bound = eager_apply(_BlockNode)


def is_by_columns(x: torch.Tensor) -> bool:
    """Return whether the cells of all channels at one position are neighbours in memory."""
    return x.movedim(1, -1).is_contiguous()


def by_columns(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` in this layout."""
    return x if is_by_columns(x) else x.movedim(1, -1).contiguous().movedim(-1, 1)
