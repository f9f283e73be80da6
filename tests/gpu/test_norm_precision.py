"""float32 norms of a split block are as precise as torch's of the whole, against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import gpudist
from gpudist.world.partition import Partition
from tests.gpu.devices import require_gpu, scaled
from tests.gpu.worlds import World

require_gpu()

GROUPS = 4
# Of the largest number, relative to the largest; a rank alone uses torch's kernel.
TOLERANCE, TORCHS = 1e-6, 1e-5


def errors(P_world: Partition, channels: int, side: int, mean: float) -> dict[str, float]:
    """Errors of a block's output and gradients, beside those of the whole in float64."""
    shape = (1, channels, side, side, side)
    P_x = P_world.create_cartesian_topology_partition([1, 1, P_world.size, 1, 1])
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(shape, generator=generator) + mean).to(P_world.device)
    gradient = torch.randn(shape, generator=generator).to(P_world.device)
    layer = gpudist.nn.DistributedGroupNorm(P_x, GROUPS, channels, replicate_parameters=True).to(
        P_world.device
    )
    wide = [t.detach().double().requires_grad_() for t in (x, layer.weight, layer.bias)]
    y = F.group_norm(wide[0], GROUPS, wide[1], wide[2])
    expected = [y, *torch.autograd.grad(y, wide, gradient.double())]
    block = slice(
        (P_world.rank or 0) * side // P_world.size, ((P_world.rank or 0) + 1) * side // P_world.size
    )
    mine = x[:, :, block].contiguous().requires_grad_()
    y = layer(mine)
    y.backward(gradient[:, :, block])
    found = [y, mine.grad, layer.weight.grad, layer.bias.grad]
    expected[:2] = [t[:, :, block] for t in expected[:2]]
    errors: dict[str, float] = {}
    names = ("y", "x", "weight", "bias")
    for name, actual, right in zip(names, found, expected, strict=True):
        assert actual is not None
        errors[name] = float((actual.detach().double() - right).abs().max() / right.abs().max())
    return errors


@pytest.mark.parametrize("mean", [0.0, 10.0])
@pytest.mark.parametrize("channels", [32, 16])
def test_errors_of_group_norm(world: World, channels: int, mean: float) -> None:
    side = scaled(64, 16) if channels == 32 else scaled(24, 8)
    for found in world.run(errors, channels=channels, side=side, mean=mean):
        assert max(found.values()) <= (TOLERANCE if world.size > 1 else TORCHS), found
