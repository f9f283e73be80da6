"""Gradients laid out in memory as torch's kernels take them to be."""

from __future__ import annotations

import torch

from gpudist.exchange.autograd import is_eager


def gradient_as_laid_out(y: torch.Tensor) -> torch.Tensor:
    """``y``, whose gradient has its strides.

    For results of torch's batch norm on the CPU: where sizes of one leave open whether a gradient
    is channels-last, its backward reads it as if it were, and is wrong without an error (torch 2.11
    to 2.13). Blocks of one sample are where that happens.
    """
    if y.requires_grad and y.device.type == "cpu" and is_eager(y):
        strides = y.stride()

        def laid_out(gradient: torch.Tensor) -> torch.Tensor | None:
            if gradient.stride() == strides:
                return None
            return gradient.new_empty_strided(gradient.shape, strides).copy_(gradient)

        y.register_hook(laid_out)
    return y
