"""Layers refuse inputs of another dtype, and sizes beyond memory, on every rank alike."""

from __future__ import annotations

import pytest
import torch

import gpudist
from gpudist import nn
from gpudist.errors import ShapeError
from gpudist.world.partition import Partition
from tests.nn.compare import grid
from tests.pool import distributed


@distributed(ranks=2, transports=("loopback",))
def test_another_dtype_is_refused_by_the_layer(P_world: Partition) -> None:
    P_x, P_rows = grid(P_world, [1, 1, 2, 1]), grid(P_world, [2, 1])
    P_features, P_y = grid(P_world, [1, 2]), grid(P_world, [1, 1])
    image, rows = torch.ones(1, 1, 4, 8), torch.ones(1, 4)
    layers = [
        (nn.DistributedConv2d(P_x, 1, 2, 3, padding=1), image),
        (nn.DistributedConvTranspose2d(P_x, 1, 2, 3), image),
        (nn.DistributedPReLU(P_x), image),
        (nn.DistributedLinear(P_rows, 4, 2), rows),
        (nn.DistributedLinear(P_features, P_y, P_features, 8, 2), rows),
    ]
    for layer, x in layers:
        text = (
            f"{type(layer).__name__}: the input has dtype torch.%s, expected torch.float32; pass x"
        )
        with pytest.raises(
            ShapeError, match=text % "float64" + r".float\(\), or use torch.autocast$"
        ):
            layer(x.double())
        with torch.autocast("cpu", torch.bfloat16):
            layer(x)
            with pytest.raises(ShapeError, match=text % "int16" + r".float\(\)$"):
                layer(x.short())


@distributed(ranks=2, transports=("loopback",))
def test_sizes_beyond_64_bits_are_refused(P_world: Partition) -> None:
    P_x, P_rows = grid(P_world, [1, 1, 2, 1]), grid(P_world, [2, 1])
    with pytest.raises(ShapeError, match=r"a parameter of shape \[1, 1, 461.* give smaller sizes"):
        nn.DistributedConv2d(P_x, 1, 1, 2**62)
    with pytest.raises(ShapeError, match=r"a parameter of shape \[10995.*, 10995.*\] has more"):
        nn.DistributedLinear(P_rows, 2**40, 2**40)
    with pytest.raises(ShapeError, match=r"a parameter of shape \[461.*\] has more bytes"):
        nn.DistributedBatchNorm2d(P_x, 2**62)
    with pytest.raises(ShapeError, match=r"an input of shape \[1, 1, 461.*, 8\] has more bytes"):
        gpudist.plan_of(torch.nn.Conv2d(1, 1, 3), P_x, (1, 1, 2**62, 8))
