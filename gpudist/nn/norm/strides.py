"""Gradients with the memory layout that torch's kernels expect."""

from __future__ import annotations

import torch

from gpudist.exchange.autograd import is_eager
from gpudist.nn.kernel_choice import suits_cpu


def gradient_as_laid_out(y: torch.Tensor) -> torch.Tensor:
    """Return ``y``, and copy its gradient to the strides of ``y`` if they differ.

    Required for results of torch's batch norm and instance norm on the CPU (torch 2.11 to 2.13). If
    extents of 1 make it ambiguous whether a gradient is channels-last, torch's backward reads it
    as channels-last, and returns wrong numbers without an error. This happens with blocks of one
    sample.
    """
    if y.requires_grad and suits_cpu(y) and is_eager(y):
        strides = y.stride()

        def lay_out(gradient: torch.Tensor) -> torch.Tensor | None:
            if gradient.stride() == strides:
                return None
            return gradient.new_empty_strided(gradient.shape, strides).copy_(gradient)

        y.register_hook(lay_out)
    return y
