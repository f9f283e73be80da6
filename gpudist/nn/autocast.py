"""Dtypes under autocast of computations that torch does not see as one layer."""

from __future__ import annotations

import torch

from gpudist.exchange import Movement
from gpudist.exchange.autograd import move

_LOW = (torch.float16, torch.bfloat16)


def autocast_is_on(device: torch.device) -> bool:
    """Return whether autocast is enabled for tensors on ``device``; always false for ``meta``."""
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def product_dtype(x: torch.Tensor) -> torch.dtype:
    """Return the dtype of torch's convolution of ``x``, or of its product with a weight."""
    casts = autocast_is_on(x.device) and x.dtype != torch.float64
    return torch.get_autocast_dtype(x.device.type) if casts else x.dtype


def loss_dtype(x: torch.Tensor) -> torch.dtype:
    """Return the dtype of a torch loss of ``x``, which autocast computes in single precision."""
    casts = autocast_is_on(x.device) and x.dtype in _LOW
    return torch.float32 if casts else x.dtype


def sum_of_products(reduction: Movement, y: torch.Tensor) -> torch.Tensor:
    """Sum products over workers; under autocast, in the dtype of the layer's input."""
    if not autocast_is_on(y.device):
        return move((reduction,), (y,))[0]
    (total,) = move((reduction,), (y.to(reduction.input_dtype),))
    return total.to(product_dtype(total))
