"""Convolution layers compared with torch's layer, and a convolution during a halo exchange.

``forward`` and ``both ways``: the layer and torch's circular layer copy the block next to its
ghosts. ``beside a halo``: torch's convolution of the block while a halo exchange of the same block
runs on another stream. Target of the last: at most 1.05 times the convolution alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.case import Side
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.measure import GpuCase
from benchmarks.gpu.self_halo import exchange_of, name_of
from gpudist.nn import DistributedConv2d, DistributedConv3d
from gpudist.world.partition import Partition

SHAPES = (
    *((1, 64, 1024, 1024), (1, 64, 256, 256)),
    *((1, 32, 128, 128, 128), (1, 32, 64, 64, 64)),
)
TINY = ((1, 2, 512, 512), (1, 2, 64, 64, 33))
WAYS = ("forward", "both ways", "beside a halo")
# Relative bound, in Euclidean norm, for results whose products are rounded to tf32.
TOLERANCE = 2e-3
OURS = {4: DistributedConv2d, 5: DistributedConv3d}
TORCHS = {4: torch.nn.Conv2d, 5: torch.nn.Conv3d}
Results = tuple[torch.Tensor, ...]


def cases(ranks: int, tiny: bool = False) -> list[GpuCase]:
    """Return the cases.

    Shapes are a rank's block; bytes are left out, since arithmetic dominates.
    """
    return [
        GpuCase("overlap", f"{name_of(shape)}, {way}", ranks, 0, {"shape": shape, "way": way})
        for shape in (TINY if tiny else SHAPES)
        for way in WAYS
    ]


def sides(case: GpuCase, P_world: Partition, machine: Machine) -> dict[str, Side]:
    """Return the sides; a peer whose block has neighbours is right only away from the cuts."""
    shape, way = case.parameters["shape"], case.parameters["way"]
    torch.backends.cudnn.benchmark = True
    whole = (shape[0], shape[1], shape[2] * P_world.size, *shape[3:])
    rows = slice((P_world.rank or 0) * shape[2], ((P_world.rank or 0) + 1) * shape[2])
    generator = torch.Generator(P_world.device).manual_seed(0)
    x = torch.rand(whole, generator=generator, device=generator.device) - 0.5
    gy = torch.rand(whole, generator=generator, device=generator.device) - 0.5
    sequential = _layer(TORCHS[len(shape)], (), shape, P_world.device)
    with torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=False):
        expected = both_ways(sequential, x, gy)
    block, gradient = x[:, :, rows].contiguous(), gy[:, :, rows].contiguous()
    expected = (expected[0][:, :, rows], expected[1][:, :, rows], *expected[2:])
    if way == "beside a halo":
        return _beside(block, sequential, expected[0], P_world, machine)

    P_x = exchange_of(shape, P_world).P_x
    layers: dict[str, torch.nn.Module] = {
        "gpudist": _layer(OURS[len(shape)], (P_x,), shape, P_world.device),
        "local torch": sequential,
    }
    run = _forward if way == "forward" else both_ways
    inside = slice(None) if P_world.size == 1 else slice(1, -1)
    return {
        name: Side(
            lambda layer=layer: run(layer, block, gradient),
            _is_right(expected, inside if layer is sequential else None),
        )
        for name, layer in layers.items()
    }


def _layer(
    kind: Any, partitions: tuple[Any, ...], shape: tuple[int, ...], device: torch.device
) -> torch.nn.Module:
    torch.manual_seed(0)
    channels = shape[1]
    layer = kind(*partitions, channels, channels, 3, padding=1, padding_mode="circular")
    return layer.to(device)


@torch.enable_grad()
def both_ways(layer: torch.nn.Module, x: torch.Tensor, gy: torch.Tensor) -> Results:
    x = x.detach().requires_grad_()
    y = layer(x)
    return (y.detach(), *torch.autograd.grad(y, [x, *layer.parameters()], gy))


@torch.no_grad()
def _forward(layer: torch.nn.Module, x: torch.Tensor, gy: torch.Tensor) -> Results:
    return (layer(x),)


def _beside(
    block: torch.Tensor,
    layer: torch.nn.Module,
    expected: torch.Tensor,
    P_world: Partition,
    machine: Machine,
) -> dict[str, Side]:
    exchange = exchange_of(tuple(block.shape), P_world)
    inside = (slice(None),) * 2 + (slice(1, -1),) * (block.dim() - 2)
    weight, bias = (p.detach() for p in layer.parameters())

    def convolve() -> torch.Tensor:
        none, ones = (0,) * (block.dim() - 2), (1,) * (block.dim() - 2)
        return torch.convolution(block, weight, bias, ones, ones, ones, False, none, 1)

    def beside() -> torch.Tensor:
        join = machine.beside(lambda: exchange(block))
        y = convolve()
        join()
        return y

    is_right: Callable[[torch.Tensor], bool] = lambda y: close(y[inside], expected[inside])  # noqa: E731
    return {"gpudist": Side(beside, is_right), "convolution alone": Side(convolve, is_right)}


def _is_right(expected: Results, inside: slice | None) -> Callable[[Results], bool]:
    """Compare all results or, for a block that was cut, only the cells ``inside``."""

    def is_right(results: Results) -> bool:
        if inside is None or inside == slice(None):
            shown = [(a, b) for a, b in zip(results, expected, strict=False) if a.numel()]
            return all(close(a, b) for a, b in shown)
        return all(
            close(a[:, :, inside], b[:, :, inside])
            for a, b in zip(results[:2], expected[:2], strict=False)
        )

    return is_right


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are equal up to rounding."""
    return a.shape == b.shape and bool((a - b).norm() <= TOLERANCE * b.norm())
