"""Gradients of norms in any memory layout: torch's own kernels misread some of them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import gpudist
from gpudist.world.partition import Partition
from tests.nn.compare import assert_equal_to, grid, own_block, random_like_all
from tests.pool import distributed

SHAPE = (2, 2, 4, 8)
NORMS: dict[str, Any] = {
    "batch norm": lambda: nn.BatchNorm2d(2),
    "instance norm": lambda: nn.InstanceNorm2d(2, affine=True),
}


def gradients(norm: Any, x: torch.Tensor, cotangent: torch.Tensor) -> list[torch.Tensor]:
    """Return the gradients of input and parameters.

    The cotangent is made in rows, at its source.
    """
    x = x.detach().requires_grad_()
    y = norm(x).permute(2, 3, 1, 0)
    if isinstance(y, gpudist.GlobalTensor):
        copies = [gpudist.sbp.broadcast] * y.placement.axes
        (y * gpudist.to_global(cotangent, y.placement, copies)).sum().backward()
    else:
        (y * cotangent).sum().backward()
    found = [x.grad, *(p.grad for p in norm.parameters())]
    assert all(g is not None for g in found)
    return found  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", NORMS)
@distributed(ranks=2, transports=["loopback"])
def test_gradients_of_one_sample(P_world: Partition, name: str, training: bool) -> None:
    """Each worker has one of the two samples; the network alone, with both, is right."""
    P_x = grid(P_world, [2, 1, 1, 1])
    alone = NORMS[name]().double().train(training)
    net: Any = gpudist.distribute(copy.deepcopy(alone), P_x)
    x, cotangent = random_like_all(SHAPE, 1), random_like_all((4, 8, 2, 2), 2)
    expected = gradients(alone, x, cotangent)
    found = gradients(net, own_block(x, P_x, requires_grad=False), cotangent)
    assert_equal_to(found[0], own_block(expected[0], P_x, requires_grad=False), 1e-12, "input")
    for g, whole in zip(found[1:], expected[1:], strict=True):
        assert_equal_to(g, whole, 1e-12, "parameter")


@pytest.mark.parametrize("name", ["BatchNorm", "InstanceNorm2d"])
@distributed(ranks=2, transports=["loopback"])
def test_gradients_of_layers(P_world: Partition, name: str) -> None:
    P_x = grid(P_world, [2, 1, 1, 1])
    make: Any = getattr(gpudist.nn, f"Distributed{name}")
    layer = make(P_x, 2).double().eval()
    x, cotangent = random_like_all((1, *SHAPE[1:]), 1), random_like_all((4, 8, 2, 1), 2)
    (found,) = gradients(layer, x, cotangent)[:1]
    y = x.detach().requires_grad_()
    layer(y).backward(cotangent.permute(3, 2, 0, 1).contiguous())
    assert y.grad is not None
    assert_equal_to(found, y.grad, 1e-12, "input")
