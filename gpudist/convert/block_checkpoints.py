"""Activation checkpoints around every block of a network."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gpudist.checks.arguments import checked
from gpudist.convert.block_effects import RepeatedForward

# Attribute of classes that recompute: whether it is by a plan.
_MARK = "_gpudist_recomputes_by_plan"


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
    for block in blocks_of(network).values():
        block.__class__ = recomputing_class(type(block), by_plan=False)
    return network


def blocks_of(network: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks of a network that :func:`recompute` recomputes, by path."""
    elements = [
        child
        for parent in network.modules()
        if isinstance(parent, (nn.Sequential, nn.ModuleList))
        for child in parent.children()
        if any(child.children())
    ]
    known = set(map(id, elements))
    return {
        path: x
        for path, x in network.named_modules()
        if id(x) in known
        and not isinstance(x, nn.ModuleList)
        and not any(id(y) in known for y in x.modules() if y is not x)
    }


@cache
def recomputing_class(kind: type[nn.Module], by_plan: bool) -> type[nn.Module]:
    """Return the class of modules of a kind that recompute their forward, by a plan or not."""
    if hasattr(kind, _MARK):
        return kind

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return kind.forward(self, *args, **kwargs)
        repeated = RepeatedForward(self, kind.forward)
        return checkpoint(repeated, kwargs, *args, use_reentrant=False)

    def reduce(self: nn.Module, protocol: Any) -> Any:
        make, args, *state = kind.__reduce_ex__(self, protocol)
        if type(self) is not made:
            return make, args, *state
        # Its name is that of another class.
        args = tuple(kind if x is made else x for x in args)
        return _make_recomputing, (by_plan, make, args), *state

    body = {"__module__": kind.__module__, _MARK: by_plan}
    made = type(kind.__name__, (kind,), {**body, "forward": forward, "__reduce_ex__": reduce})
    return made


def _make_recomputing(by_plan: bool, make: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    module = make(*args)
    module.__class__ = recomputing_class(type(module), by_plan=by_plan)
    return module


def without_plan(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the class of a module before a plan had it recomputed."""
    return kind.__mro__[1] if vars(kind).get(_MARK) else kind
