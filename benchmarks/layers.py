"""Layers, forward and backward, beside torch's own layer on the same block and no messages."""

from __future__ import annotations

from copy import deepcopy
from math import prod

import torch

from benchmarks.case import Case, Side
from benchmarks.conv import Results, close
from benchmarks.halo import grid_of
from gpudist import nn
from gpudist.geometry.blocks import Decomposition
from gpudist.partition import CartesianPartition, Partition

IMAGE, ROWS = (4, 32, 128, 128), (256, 1024)
# The layer, and its arguments.
ON_IMAGES: tuple[tuple[str, tuple[int, ...]], ...] = (
    ("Conv2d", (32, 32, 3, 1, 1)),
    ("MaxPool2d", (3, 2, 1)),
    ("AvgPool2d", (2,)),
    ("BatchNorm2d", (32,)),
    ("GroupNorm", (8, 32)),
    ("InstanceNorm2d", (32,)),
)
ON_ROWS: tuple[tuple[str, tuple[int, ...]], ...] = (("Linear", (1024, 1024)),)


def cases(ranks: int) -> list[Case]:
    """Shapes are global: images are cut along their spatial dims, rows among the ranks."""
    cuts = ((ON_IMAGES, IMAGE, grid_of(ranks, 4)), (ON_ROWS, ROWS, (ranks, 1)))
    return [
        _case(ranks, layer, arguments, shape, grid)
        for layers, shape, grid in cuts
        for layer, arguments in layers
        if hasattr(nn, f"Distributed{layer}")
    ]


def _case(
    ranks: int,
    layer: str,
    arguments: tuple[int, ...],
    shape: tuple[int, ...],
    grid: tuple[int, ...],
) -> Case:
    block = prod(shape) * 4 // ranks
    words = [",".join(map(str, numbers)) for numbers in (arguments, shape, grid)]
    name = f"{layer}({words[0]}), global [{words[1]}] on [{words[2]}]"
    parameters = {"layer": layer, "arguments": arguments, "shape": shape, "grid": grid}
    return Case("layers", name, ranks, block, parameters, block)


def sides(case: Case, P_world: Partition) -> dict[str, Side]:
    """Results are the output and the gradients of input and parameters."""
    layer, arguments = case.parameters["layer"], case.parameters["arguments"]
    shape = case.parameters["shape"]
    P_x = P_world.create_cartesian_topology_partition(case.parameters["grid"])
    torch.manual_seed(0)
    distributed = getattr(nn, f"Distributed{layer}")(P_x, *arguments)
    torch.manual_seed(0)
    sequential = getattr(torch.nn, layer)(*arguments)
    x = torch.rand(shape) - 0.5
    gy = torch.rand(sequential(x).shape) - 0.5
    y, gx, *parameters = in_double(sequential, x, gy)
    expected = (block_of(y, P_x), block_of(gx, P_x), *parameters)
    x, gy = block_of(x, P_x), block_of(gy, P_x)
    alone = in_double(sequential, x, gy)
    return {
        "gpudist": Side(
            lambda: both_ways(distributed, x, gy), lambda results: are_close(results, expected)
        ),
        "local torch": Side(
            lambda: both_ways(sequential, x, gy), lambda results: are_close(results, alone)
        ),
    }


@torch.enable_grad()
def both_ways(layer: torch.nn.Module, x: torch.Tensor, gy: torch.Tensor) -> Results:
    """The output and the gradients of a forward and a backward."""
    x = x.detach().requires_grad_()
    y = layer(x)
    return (y.detach(), *torch.autograd.grad(y, [x, *layer.parameters()], gy))


def in_double(layer: torch.nn.Module, x: torch.Tensor, gy: torch.Tensor) -> Results:
    results = both_ways(deepcopy(layer).double(), x.double(), gy.double())
    return tuple(each.float() for each in results)


def block_of(whole: torch.Tensor, P_x: CartesianPartition) -> torch.Tensor:
    """This rank's block."""
    assert P_x.index is not None
    return whole[Decomposition.balanced(whole.shape, P_x.shape).block(P_x.index).slices].clone()


def are_close(results: Results, expected: Results) -> bool:
    """A parameter's gradient may be on another rank."""
    y, gx, *parameters = results
    return (
        close(y, expected[0])
        and close(gx, expected[1])
        and all(
            gradient.numel() == 0 or close(gradient, whole)
            for gradient, whole in zip(parameters, expected[2:], strict=True)
        )
    )
