"""Activation checkpoints around every block of a network."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gpudist.checks.arguments import checked


@checked()
def recompute(network: nn.Module) -> nn.Module:
    """Let every block of ``network`` recompute its activations in backward.

    A block is an element of an ``nn.Sequential`` or an ``nn.ModuleList`` that has modules of its
    own, but no such element within. Only its input is kept, by ``torch.utils.checkpoint``. Call it
    before :func:`gpudist.distribute`.

    Args:
        network: network of torch modules. Names of parameters stay as they are.

    Returns:
        The same network.
    """
    for block in _blocks(network):
        block.__class__ = _recomputed(type(block))
    return network


def _blocks(network: nn.Module) -> list[nn.Module]:
    elements = [
        child
        for parent in network.modules()
        if isinstance(parent, (nn.Sequential, nn.ModuleList))
        for child in parent.children()
        if any(child.children())
    ]
    known = set(map(id, elements))
    return [
        x
        for x in dict.fromkeys(elements)
        if not isinstance(x, nn.ModuleList)
        and not any(id(y) in known for y in x.modules() if y is not x)
    ]


@cache
def _recomputed(kind: type[nn.Module]) -> type[nn.Module]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return kind.forward(self, *args, **kwargs)
        return checkpoint(kind.forward, self, *args, use_reentrant=False, **kwargs)

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})
