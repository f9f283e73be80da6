"""Under autocast, a convolution moves ghosts in the dtype of its product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import gpudist
from gpudist.world.partition import CartesianPartition, Partition
from tests.nn.compare import grid, own_block
from tests.pool import distributed

Door = Callable[[nn.Module, CartesianPartition], nn.Module]


def as_layer(module: nn.Module, P_x: CartesianPartition) -> nn.Module:
    kinds: dict[type[nn.Module], Any] = {
        nn.Conv2d: gpudist.nn.DistributedConv2d,
        nn.ConvTranspose2d: gpudist.nn.DistributedConvTranspose2d,
    }
    layer = kinds[type(module)](P_x, 2, 3, 3, padding=1, replicate_parameters=True)
    layer.load_state_dict(module.state_dict())
    return layer


@pytest.mark.parametrize("door", [as_layer, gpudist.distribute])
@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
@distributed(ranks=2, transports=["loopback"])
def test_ghosts_of_single_precision_move_in_16_bits(
    P_world: Partition, kind: type[nn.Conv2d], door: Door
) -> None:
    P_x = grid(P_world, [1, 1, 2, 1])
    torch.manual_seed(0)
    module, whole = kind(2, 3, 3, padding=1), torch.randn(1, 2, 8, 6)
    network = door(module, P_x)
    moved: list[int] = []
    for is_on in (False, True):
        x = own_block(whole, P_x).detach().clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=is_on):
            network(x)  # agrees on shapes
            gpudist.stats(reset=True, P_world=P_world)
            y = network(x)
        moved.append(gpudist.stats(P_world=P_world).total.sent_bytes)
        y.float().square().sum().backward()
        with torch.autocast("cpu", torch.bfloat16, enabled=is_on):
            alone = whole.clone().requires_grad_()
            expected = module(alone)
        expected.float().square().sum().backward()
        assert y.dtype == expected.dtype and x.grad is not None and alone.grad is not None
        assert x.grad.dtype == torch.float32
        tolerance: dict[str, Any] = {"rtol": 2e-2, "atol": 2e-2} if is_on else {}
        block = y.to_local() if isinstance(y, gpudist.GlobalTensor) else y
        torch.testing.assert_close(block, own_block(expected, P_x), **tolerance)
        torch.testing.assert_close(x.grad, own_block(alone.grad, P_x), **tolerance)
    assert 2 * moved[1] == moved[0] > 0
