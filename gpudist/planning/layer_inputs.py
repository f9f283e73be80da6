"""Expectations of torch's layers about their input, for errors that name the layer."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn


def misfit(layer: nn.Module, shape: Sequence[int]) -> str:
    """Return what ``layer`` expects of an input and does not find in ``shape``; ``""`` if nothing.

    Knows convolutions, linear layers and norms.
    """
    kernel = getattr(layer, "kernel_size", ())
    channels = _number(layer, "in_channels", "num_features", "num_channels")
    if channels is not None:
        if isinstance(kernel, tuple) and kernel and len(shape) != len(kernel) + 2:
            return f"{len(kernel) + 2} dims: batch, {channels} channels, {len(kernel)} of space"
        if len(shape) > 1 and shape[1] != channels:
            return f"{channels} channels in dim 1"
    features = _number(layer, "in_features")
    if features is not None and shape[-1] != features:
        return f"{features} features in the last dim"
    return ""


def _number(layer: nn.Module, *names: str) -> int | None:
    return next((n for name in names if isinstance(n := getattr(layer, name, None), int)), None)
