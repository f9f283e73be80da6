"""Activation checkpoints around every block of a network."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gpudist.checks.arguments import checked
from gpudist.convert.block_effects import RepeatedForward


@checked()
def recompute(network: nn.Module) -> nn.Module:
    """Let every block of ``network`` recompute its activations in backward.

    A block is an element of an ``nn.Sequential`` or an ``nn.ModuleList`` that has modules of its
    own, but no such element within. Only its input is kept, by ``torch.utils.checkpoint``. Call it
    before :func:`gpudist.distribute`.

    Effects of a forward on buffers, attributes and random numbers happen once, as without it. A
    backward raises if a forward has changed its input, or a parameter that requires grad, in place.

    Args:
        network: network of torch modules. Names of parameters stay as they are.

    Returns:
        The same network.

    Cost:
        Each forward copies the block's buffers and frozen parameters, and keeps copies of those
        that it changes; a GPU also keeps those of less than 1 MiB.
    """
    for block in blocks_of(network).values():
        let_recompute(block, by_plan=False)
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


class Recomputed:
    """Forward of a module that keeps its inputs alone, and runs again in backward.

    Attributes:
        module: the module.
        by_plan: whether a plan had it recomputed.
        patched: forward that the instance had instead of its class's, if any.
    """

    def __init__(self, module: nn.Module, by_plan: bool) -> None:
        self.module, self.by_plan, self.patched = module, by_plan, vars(module).get("forward")

    @property
    def __wrapped__(self) -> Any:
        return self.patched or type(self.module).forward.__get__(self.module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.__wrapped__(*args, **kwargs)
        forward = RepeatedForward(self.module, self.__wrapped__)
        # As arguments of their own, tensors are compared with what they were.
        return checkpoint(forward, [*kwargs], *args, *kwargs.values(), use_reentrant=False)


def let_recompute(module: nn.Module, by_plan: bool) -> None:
    """Let a module recompute its activations, unless it does already."""
    if not isinstance(vars(module).get("forward"), Recomputed):
        module.forward = Recomputed(module, by_plan)


def undo_plan(module: nn.Module) -> None:
    """Let a module that recomputes by a plan keep its activations."""
    recomputed = vars(module).get("forward")
    if isinstance(recomputed, Recomputed) and recomputed.by_plan:
        del module.forward
        if recomputed.patched is not None:
            module.forward = recomputed.patched
