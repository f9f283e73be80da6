"""A network of the zoo as it is judged: its weights, its inputs and its randomness."""

from __future__ import annotations

import contextlib
import functools

import torch
from torch import nn

from tests.default_dtype import float64_by_default
from tests.zoo.network import Inputs, Size
from tests.zoo.networks import network_named

_SEED = 7
# Branches that begin with a zero count as well.
_SHAKE = 0.02
_PROBABILITIES = ("p", "drop_prob", "dropout")


def in_dtype_of(name: str) -> contextlib.AbstractContextManager[None]:
    """Let a network create numbers of its dtype: float64, or float32 if it allows no other."""
    if network_named(name).single:
        return contextlib.nullcontext()
    return float64_by_default(with_complex=True)


@functools.cache
def prepared(name: str, size: Size) -> nn.Module:
    """The network in training mode, with shaken weights: the same in every process. Copy it."""
    network = network_named(name)
    torch.manual_seed(_SEED)
    net = network.make(size).train()
    if not network.single:
        net._apply(_in_double)
    if not network.random:
        _drop_nothing(net)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=_SHAKE)
    return net


@functools.cache
def inputs_of(name: str, size: Size) -> Inputs:
    """Return the whole inputs, the same in every process."""
    torch.manual_seed(_SEED + 1)
    return network_named(name).inputs(size)


def _in_double(x: torch.Tensor) -> torch.Tensor:
    if x.is_complex():
        return x.to(torch.complex128)
    return x.double() if x.is_floating_point() else x


def _drop_nothing(net: nn.Module) -> None:
    for module in net.modules():
        kind = type(module).__name__
        if "Drop" in kind or kind in ("StochasticDepth", "MultiheadAttention"):
            for name in _PROBABILITIES:
                if isinstance(getattr(module, name, None), float):
                    setattr(module, name, 0.0)
