"""Layers, forward and backward, compared with torch's layer on the same block."""

from __future__ import annotations

from copy import deepcopy
from math import prod, sqrt
from typing import Any

import torch

from benchmarks.case import Case, Side
from benchmarks.conv import Results, close
from benchmarks.halo import grid_of
from gpudist import nn
from gpudist.geometry.blocks import Decomposition
from gpudist.nn.layer_table import sequential_of
from gpudist.world.partition import CartesianPartition, Partition

IMAGE, ROWS, TOKENS = (4, 32, 128, 128), (256, 1024), (64, 256)
SERIES = (8, 32, 4096)
# Families whose layers take several inputs.
SEVERAL_INPUTS = ("attention", "loss")
Layers = tuple[tuple[str, tuple[Any, ...]], ...]
# Layers and their arguments.
ON_IMAGES: Layers = (
    ("Conv2d", (32, 32, 3, 1, 1)),
    ("MaxPool2d", (3, 2, 1)),
    ("AvgPool2d", (2,)),
    ("BatchNorm2d", (32,)),
    ("GroupNorm", (8, 32)),
    ("InstanceNorm2d", (32,)),
    ("ConvTranspose2d", (32, 32, 2, 2)),
    ("LPPool2d", (2, 2)),
    ("AdaptiveAvgPool2d", (16,)),
    ("ReflectionPad2d", (1,)),
    ("PixelShuffle", (2,)),
    ("UpsamplingBilinear2d", (None, 2)),
    ("Dropout", (0.1,)),
)
ON_ROWS: Layers = (
    ("Linear", (1024, 1024)),
    ("LayerNorm", (1024,)),
    ("Softmax", (0,)),
)
ON_TOKENS: Layers = (("Embedding", (8192, 256)),)
ON_SERIES: Layers = (("CausalConv1d", (32, 32, 3)),)


def cases(ranks: int) -> list[Case]:
    """Return the cases.

    Shapes are global: images and series are split along spatial dims, other inputs along rows.
    """
    cuts = (
        *((ON_IMAGES, IMAGE, grid_of(ranks, 4)), (ON_ROWS, ROWS, (ranks, 1))),
        *((ON_TOKENS, TOKENS, (ranks, 1)), (ON_SERIES, SERIES, (1, 1, ranks))),
    )
    found = [
        _case(ranks, layer, arguments, shape, grid)
        for layers, shape, grid in cuts
        for layer, arguments in layers
        if hasattr(nn, f"Distributed{layer}")
    ]
    return found + _samples(ranks, {case.parameters["layer"] for case in found})


def _samples(ranks: int, measured: set[str]) -> list[Case]:
    """Return sample calls, with blocks 16 times as long, of files of which no layer is measured."""
    files = {row.kind.__module__ for row in nn.LAYERS if row.name[len("Distributed") :] in measured}
    found: list[Case] = []
    for row in nn.LAYERS:
        if row.family in SEVERAL_INPUTS or row.kind.__module__ in files:
            continue
        files.add(row.kind.__module__)
        batch, channels, *extents = row.inputs[0].shape
        shape = (batch, channels, *(16 * n for n in extents))
        layer = row.name.removeprefix("Distributed")
        found.append(_case(ranks, layer, (), shape, grid_of(ranks, len(shape)), row.arguments))
    return found


def _case(
    ranks: int,
    layer: str,
    arguments: tuple[Any, ...],
    shape: tuple[int, ...],
    grid: tuple[int, ...],
    options: dict[str, Any] | None = None,
) -> Case:
    block = prod(shape) * 4 // ranks
    options = options or {}
    shown = (*arguments, *(f"{name}={value}" for name, value in options.items()))
    words = [",".join(map(str, numbers)) for numbers in (shown, shape, grid)]
    name = f"{layer}({words[0]}), global [{words[1]}] on [{words[2]}]"
    parameters = {"layer": layer, "arguments": arguments, "shape": shape, "grid": grid}
    if options:
        parameters["options"] = options
    return Case("layers", name, ranks, block, parameters, block)


def sides(case: Case, P_world: Partition) -> dict[str, Side]:
    """Return the sides; results are the output and the gradients of input and parameters."""
    layer, arguments = case.parameters["layer"], case.parameters["arguments"]
    shape, options = case.parameters["shape"], case.parameters.get("options", {})
    P_x = P_world.create_cartesian_topology_partition(case.parameters["grid"])
    torch.manual_seed(0)
    kind = getattr(nn, f"Distributed{layer}")
    distributed = kind(P_x, *arguments, **options)
    torch.manual_seed(0)
    sequential = sequential_of(kind)(*arguments, **options)
    x = torch.randint(arguments[0], shape) if layer == "Embedding" else torch.rand(shape) - 0.5
    gy = torch.rand(sequential(x).shape) - 0.5
    # Dims that only the output has are not split.
    more = [1] * (gy.dim() - x.dim())
    P_y = P_world.create_cartesian_topology_partition([*P_x.shape, *more])
    y, gx, *parameters = in_double(sequential, x, gy)
    expected = (block_of(y, P_y), block_of(gx, P_x), *parameters)
    x, gy = block_of(x, P_x), block_of(gy, P_y)
    # The output of a block alone may have another shape, since it is padded on all sides.
    gy_alone = torch.rand(sequential(x).shape) - 0.5
    alone = in_double(sequential, x, gy_alone)

    def is_right(results: Results, expected: Results, gy: torch.Tensor) -> bool:
        if layer == "Dropout":
            return is_dropped(results, x, gy, *arguments)
        return are_close(results, expected)

    return {
        "gpudist": Side(lambda: both_ways(distributed, x, gy), lambda r: is_right(r, expected, gy)),
        "local torch": Side(
            lambda: both_ways(sequential, x, gy_alone), lambda r: is_right(r, alone, gy_alone)
        ),
    }


def is_dropped(results: Results, x: torch.Tensor, gy: torch.Tensor, p: float) -> bool:
    """Whether the same cells of output and gradient are 0, and about as many as requested."""
    y, gx = results
    kept = (y != 0) / (1 - p)
    share = (y == 0).float().mean().item()
    five_deviations = 5 * sqrt(p * (1 - p) / y.numel())
    return close(y, x * kept) and close(gx, gy * kept) and abs(share - p) < five_deviations


@torch.enable_grad()
def both_ways(layer: torch.nn.Module, x: torch.Tensor, gy: torch.Tensor) -> Results:
    """Return the output and the gradients of a forward and a backward pass."""
    if not x.is_floating_point():  # The input is compared as its own gradient.
        y = layer(x)
        return (y.detach(), x, *torch.autograd.grad(y, [*layer.parameters()], gy))
    x = x.detach().requires_grad_()
    y = layer(x)
    return (y.detach(), *torch.autograd.grad(y, [x, *layer.parameters()], gy))


def in_double(layer: torch.nn.Module, x: torch.Tensor, gy: torch.Tensor) -> Results:
    x = x.double() if x.is_floating_point() else x
    results = both_ways(deepcopy(layer).double(), x, gy.double())
    return tuple(each.float() for each in results)


def block_of(whole: torch.Tensor, P_x: CartesianPartition) -> torch.Tensor:
    """Return this rank's block."""
    assert P_x.index is not None
    return whole[Decomposition.balanced(whole.shape, P_x.shape).block(P_x.index).slices].clone()


def are_close(results: Results, expected: Results) -> bool:
    """Whether results agree up to rounding; a parameter's gradient may be on another rank."""
    y, gx, *parameters = results
    return (
        close(y, expected[0])
        and close(gx, expected[1])
        and all(
            gradient.numel() == 0 or close(gradient, whole)
            for gradient, whole in zip(parameters, expected[2:], strict=True)
        )
    )
