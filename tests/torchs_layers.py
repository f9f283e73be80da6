"""Torch's layers, with the results of the newest torch."""

from __future__ import annotations

import inspect
from typing import Any

import torch

_HAS_INFINITE_NORMS = bool(torch.nn.LPPool1d(float("inf"), 1)(torch.zeros(1, 1, 1)) == 0)


def torchs_layer(name: str, **options: Any) -> torch.nn.Module:
    """``torch.nn``'s layer of this name."""
    make = getattr(torch.nn, name)
    if options.get("bias") is False and "Norm" in name and not _takes_bias(make):
        del options["bias"]
        layer = make(**options)
        layer.register_parameter("bias", None)
        return layer
    layer = make(**options)
    is_infinite = abs(options.get("norm_type", 0)) == float("inf")
    if name.startswith("LPPool") and is_infinite and not _HAS_INFINITE_NORMS:
        return _LargestNorm(layer)
    return layer


def _takes_bias(make: Any) -> bool:
    return any("bias" in inspect.signature(each.__init__).parameters for each in make.__mro__)


class _LargestNorm(torch.nn.Module):
    """An infinite norm, which is 1 of any cells in torch 2.11."""

    def __init__(self, pool: Any) -> None:
        super().__init__()
        maximum = getattr(torch.nn, type(pool).__name__.replace("LP", "Max"))
        self.maximum = maximum(pool.kernel_size, pool.stride, ceil_mode=pool.ceil_mode)
        self.sign = 1 if pool.norm_type > 0 else -1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.sign * self.maximum(self.sign * x.abs())
