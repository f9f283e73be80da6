"""The normalization kernels on a GPU, compared with the same layers in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.gpu.norms import unshared
from gpudist import nn
from gpudist.nn.norm import node
from gpudist.world.partition import CartesianPartition, Partition
from tests.gpu.devices import require_gpu, scaled
from tests.gpu.worlds import OneRank

require_gpu()

KINDS = ("batch", "group", "instance", "layer", "RMS")
# Errors relative to the largest value: rounding of the results, and of their terms.
TOLERANCES = {torch.float32: 4e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
SHAPES = (
    (2, 6, 5, 8, 8), (1, 32, 33, 32, 32), (3, 5, 7, 3, 3), (2, 48, 1, 1, 1),
    (1, 3, scaled(96, 12), 96, scaled(96, 12)), (700, 4, 1, 1, 6), (1, 130, 9, 4, 4),
)  # fmt: skip


def layers_of(
    kind: str, P: CartesianPartition, shape: tuple[int, ...]
) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Return our layer and torch's; ``P`` splits nothing."""
    channels = shape[1]
    groups = 3 if channels % 3 == 0 else 1
    if kind == "batch":
        return nn.DistributedBatchNorm3d(P, channels), torch.nn.BatchNorm3d(channels)
    if kind == "group":
        return nn.DistributedGroupNorm(P, groups, channels), torch.nn.GroupNorm(groups, channels)
    if kind == "instance":
        ours = nn.DistributedInstanceNorm3d(P, channels, affine=True)
        return ours, torch.nn.InstanceNorm3d(channels, affine=True)
    last = list(shape[3:])
    if kind == "layer":
        return nn.DistributedLayerNorm(P, last), torch.nn.LayerNorm(last)
    return nn.DistributedRMSNorm(P, last, eps=1e-5), torch.nn.RMSNorm(last, eps=1e-5)


def cases() -> list[Any]:
    return [
        pytest.param(kind, shape, dtype, layout, id=f"{kind}-{shape}-{str(dtype)[6:]}-{layout}")
        for kind in KINDS
        for shape in SHAPES
        for dtype in TOLERANCES
        for layout in ("contiguous", "channels_last")
        if layout == "contiguous" or kind in ("batch", "group", "instance")
        if not (kind in ("instance", "layer", "RMS") and shape[2:] == (1, 1, 1))
    ]


@pytest.mark.parametrize(("kind", "shape", "dtype", "layout"), cases())
def test_as_in_float64(
    one_rank: OneRank,
    kind: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    layout: str,
) -> None:
    one_rank.run(compare, kind=kind, shape=shape, dtype=dtype, layout=layout)


def compare(
    P_world: Partition, kind: str, shape: tuple[int, ...], dtype: torch.dtype, layout: str
) -> None:
    mean = 100.0 if kind != "RMS" else 0.0
    P = P_world.create_cartesian_topology_partition([1] * len(shape))
    generator = torch.Generator().manual_seed(1)
    x, gy = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    x = x + mean
    ours, exact = layers_of(kind, P, shape)
    with torch.no_grad():
        for p, q in zip(ours.parameters(), exact.parameters(), strict=True):
            q.copy_(torch.randn(q.shape, generator=generator) + 1)
            p.copy_(q)
    expected = both_ways(exact.double(), x.double(), gy.double())
    ours = ours.to(P_world.device)
    given, gradient = x.to(P_world.device), gy.to(P_world.device)
    if layout == "channels_last":
        given, gradient = (
            t.contiguous(memory_format=torch.channels_last_3d) for t in (given, gradient)
        )
    with unshared(), pytest.MonkeyPatch.context() as patch:
        calls: list[torch.Tensor] = []
        apply_bound = node.apply_bound

        def counted(*arguments: Any) -> Any:
            calls.append(arguments[3])
            return apply_bound(*arguments)

        patch.setattr(node, "apply_bound", counted)
        found = both_ways(ours, given, gradient)
        again = both_ways(ours, given, gradient)
        assert len(calls) == 2
    for name, mine, same, exactly in zip(
        ("y", "x", "weight", "bias"), found, again, expected, strict=False
    ):
        assert torch.equal(mine, same), name
        error = (mine.cpu().double() - exactly).abs().max()
        allowed = TOLERANCES[mine.dtype] * (1 + mean / 20) * exactly.abs().max()
        assert error <= allowed, (name, float(error), float(allowed))
    if kind == "batch":
        theirs = exact.running_mean, exact.running_var
        for mine, exactly in zip((ours.running_mean, ours.running_var), theirs, strict=True):
            # Ours saw the block twice.
            assert isinstance(mine, torch.Tensor) and isinstance(exactly, torch.Tensor)
            start = 0.0 if exactly is exact.running_mean else 1.0
            twice = exactly + 0.9 * (exactly - start)
            torch.testing.assert_close(mine.cpu().double(), twice, rtol=2e-5, atol=1e-5)


def both_ways(
    layer: torch.nn.Module, x: torch.Tensor, gy: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    x = x.detach().requires_grad_()
    y = layer(x)
    return (y.detach(), *torch.autograd.grad(y, [x, *layer.parameters()], gy))
