"""A 3-D U-Net trains on several ranks as on one, in all precisions and layouts of memory."""

from __future__ import annotations

import contextlib
from copy import deepcopy

import pytest
import torch
from torch import nn

import gpudist
from examples.networks import UNet3d
from gpudist.world.partition import Partition
from tests.gpu.devices import require_gpu, scaled
from tests.gpu.operators import whole_of
from tests.gpu.worlds import World

require_gpu()

STEPS, CLASSES = 3, 2
NORMS = ("group", "batch", "instance")
FORMATS = {"contiguous": torch.contiguous_format, "channels last": torch.channels_last_3d}
# Relative bounds of losses. In 16 and 32 bits, weights after few steps depend on rounding.
TOLERANCES = {"float64": 1e-12, "float32": 5e-5, "autocast": 2e-3}


def network(norm: str) -> nn.Module:
    found = UNet3d(1, CLASSES, width=8, levels=3)
    if norm == "group":
        return found
    for module in list(found.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.GroupNorm):
                channels = child.num_channels
                batch = nn.BatchNorm3d(channels)
                instance = nn.InstanceNorm3d(channels, affine=True)
                setattr(module, name, batch if norm == "batch" else instance)
    return found


def trained(
    P_world: Partition, norm: str, precision: str, layout: str, side: int
) -> dict[str, tuple[list[float], list[torch.Tensor]]]:
    """Losses and weights of the sequential network, and of the one converted from it."""
    device = P_world.device
    dtype = torch.float64 if precision == "float64" else torch.float32
    torch.manual_seed(0)
    plain = network(norm).to(device, dtype)
    plain = plain.to(memory_format=FORMATS[layout])  # pyright: ignore[reportCallIssue]
    x = torch.randn(2, 1, side, side, side).to(device, dtype, memory_format=FORMATS[layout])
    target = torch.randint(CLASSES, (2, side, side, side)).to(device)
    P_x = P_world.create_cartesian_topology_partition([1, 1, P_world.size, 1, 1])
    ours = gpudist.distribute(deepcopy(plain), P_x)
    found: dict[str, tuple[list[float], list[torch.Tensor]]] = {}
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        for name, each in (("torch", plain), ("gpudist", ours)):
            losses: list[float] = []
            optimizer = torch.optim.SGD(each.parameters(), lr=0.05)
            for _ in range(STEPS):
                optimizer.zero_grad()
                losses.append(_step(each, x, target, precision, None if each is plain else P_x))
                optimizer.step()
            found[name] = losses, [p.detach().cpu() for p in each.parameters()]
    return found


def _step(
    network: nn.Module,
    x: torch.Tensor,
    target: torch.Tensor,
    precision: str,
    P_x: gpudist.CartesianPartition | None,
) -> float:
    cast = torch.autocast(x.device.type, torch.bfloat16)
    with cast if precision == "autocast" else contextlib.nullcontext():
        if P_x is None:
            loss = nn.functional.cross_entropy(network(x), target)
        else:
            y = network(gpudist.scatter(x, P_x))
            whole = [gpudist.sbp.broadcast] * y.placement.ranks.ndim
            labels = gpudist.to_global(target, y.placement, whole)
            loss = nn.functional.cross_entropy(y, labels)
    loss.backward()
    return float(whole_of(loss.detach()))


@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize("precision", TOLERANCES)
@pytest.mark.parametrize("norm", NORMS)
def test_training_is_that_of_one_rank(world: World, norm: str, precision: str, layout: str) -> None:
    results = world.run(
        trained,
        norm=norm,
        precision=precision,
        layout=layout,
        side=scaled(24, 4 * max(2, world.size)),
    )
    tolerance = TOLERANCES[precision]
    for rank, found in enumerate(results):
        (expected, weights), (losses, ours) = found["torch"], found["gpudist"]
        assert losses == pytest.approx(expected, rel=tolerance), rank
        assert len(weights) == len(ours)
        if precision == "float64":
            for mine, theirs in zip(ours, weights, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)
