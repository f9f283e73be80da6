"""Norms by our kernels as on a split dim, compared with torch's layers: forward and backward.

A world of one has no messages, so that the passes alone are measured: three of the block in
forward, five in backward. ``copy_`` moves as many bytes. Targets: at 128^3 cells at most 1.4 times
the copy; at 16^3 at most torch's time or 30 us. ``enqueue`` measures the time until the calls
return.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod

import torch

from benchmarks.case import Side
from benchmarks.gpu.kernel import copy_of
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.measure import GpuCase
from gpudist import nn
from gpudist.nn.norm import kernels
from gpudist.world.partition import CartesianPartition, Partition

SHAPES = ((1, 32, 128, 128, 128), (1, 128, 16, 16, 16))
LAYER_SHAPES = ((16384, 1024), (4096, 128))
TINY, TINY_LAYERS = ((2, 8, 4, 4, 4),), ((16, 8),)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LAYOUTS = ("contiguous", "channels_last")
# Relative bounds, in Euclidean norm.
TOLERANCES = {"float32": 1e-5, "bfloat16": 2e-2}
PASSES = 8
Results = tuple[torch.Tensor, ...]


def cases(ranks: int, tiny: bool = False) -> list[GpuCase]:
    """Return the cases; bytes are those of all passes of both ways."""
    return list(_cases(ranks, tiny))


def _cases(ranks: int, tiny: bool) -> Iterator[GpuCase]:
    for dtype in DTYPES:
        for shape in TINY if tiny else SHAPES:
            for kind in ("batch", "group", "instance"):
                for layout in LAYOUTS:
                    yield from _of(ranks, kind, shape, dtype, layout)
        for shape in TINY_LAYERS if tiny else LAYER_SHAPES:
            yield from _of(ranks, "layer", shape, dtype, "contiguous")


def _of(
    ranks: int, kind: str, shape: tuple[int, ...], dtype: str, layout: str
) -> Iterator[GpuCase]:
    nbytes = PASSES * prod(shape) * DTYPES[dtype].itemsize
    name = f"{kind} norm [{','.join(map(str, shape))}], {dtype}, {layout}"
    parameters = {"kind": kind, "shape": shape, "dtype": dtype, "layout": layout}
    yield GpuCase("norms", name, ranks, nbytes, parameters)
    if prod(shape) < 1 << 20:
        yield GpuCase("norms", f"{name}, enqueue", ranks, 0, parameters, clock="enqueue")


def sides(case: GpuCase, P_world: Partition, machine: Machine) -> dict[str, Side]:
    kind, dtype = case.parameters["kind"], DTYPES[case.parameters["dtype"]]
    shape, device = case.parameters["shape"], P_world.device
    generator = torch.Generator(device).manual_seed(0)
    x, gy = (torch.randn(shape, generator=generator, device=device).to(dtype) for _ in range(2))
    if case.parameters["layout"] == "channels_last":
        x, gy = (t.to(memory_format=torch.channels_last_3d) for t in (x, gy))
    P_x = P_world.create_cartesian_topology_partition([1] * len(shape))
    # Of torch's norms, batch norm alone takes parameters of another dtype on a GPU.
    held = torch.float32 if kind == "batch" else dtype
    ours = _distributed(kind, P_x, shape).to(device, held)
    theirs = _sequential(kind, shape).to(device, held)
    expected = tuple(
        t.to(torch.float32) for t in both_ways(_sequential(kind, shape).to(device).double(), x, gy)
    )
    tolerance = TOLERANCES[case.parameters["dtype"]]
    right = _is_right(expected, tolerance)

    def by_kernels() -> Results:
        with unshared():
            return both_ways(ours, x, gy)

    found = {
        "gpudist": Side(by_kernels, right),
        "torch": Side(lambda: both_ways(theirs, x, gy), right),
    }
    if case.clock == "device":
        found["copy_"] = copy_of(case.bytes, device)
    return found


@contextmanager
def unshared() -> Iterator[None]:
    """Use the kernels where no statistics are shared."""
    least, kernels.UNSHARED_BYTES = kernels.UNSHARED_BYTES, 0
    try:
        yield
    finally:
        kernels.UNSHARED_BYTES = least


@torch.enable_grad()
def both_ways(layer: torch.nn.Module, x: torch.Tensor, gy: torch.Tensor) -> Results:
    """Return the gradients of the parameters and the input, and the output.

    A layer in float64 computes in float64.
    """
    parameters = list(layer.parameters())
    if parameters[0].dtype == torch.float64:
        x, gy = x.double(), gy.double()
    x = x.detach().requires_grad_()
    y = layer(x)
    return (*torch.autograd.grad(y, [*parameters, x], gy), y.detach())


def _distributed(kind: str, P_x: CartesianPartition, shape: tuple[int, ...]) -> torch.nn.Module:
    if kind == "layer":
        return nn.DistributedLayerNorm(P_x, shape[-1])
    if kind == "group":
        return nn.DistributedGroupNorm(P_x, 8, shape[1])
    if kind == "batch":
        return nn.DistributedBatchNorm3d(P_x, shape[1])
    return nn.DistributedInstanceNorm3d(P_x, shape[1], affine=True)


def _sequential(kind: str, shape: tuple[int, ...]) -> torch.nn.Module:
    if kind == "layer":
        return torch.nn.LayerNorm(shape[-1])
    if kind == "group":
        return torch.nn.GroupNorm(8, shape[1])
    if kind == "batch":
        return torch.nn.BatchNorm3d(shape[1])
    return torch.nn.InstanceNorm3d(shape[1], affine=True)


def _is_right(expected: Results, tolerance: float) -> Callable[[Results], bool]:
    def is_right(results: Results) -> bool:
        return all(
            a.shape == b.shape and bool((a.float() - b).norm() <= tolerance * b.norm())
            for a, b in zip(results, expected, strict=True)
        )

    return is_right
