"""Distributed interpolation is torch's: the same cells, the same weights, the adjoint gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from gpudist import nn
from gpudist.errors import PartitionError, ShapeError
from gpudist.world.partition import CartesianPartition, Partition
from tests.nn.compare import (
    Cut,
    assert_block_of,
    assert_same_as_sequential,
    gradient_of,
    grid,
    own_block,
    own_slices,
    random_like_all,
)
from tests.pool import distributed

LOOPBACK = ["loopback"]


def check(
    P_x: CartesianPartition,
    shape: Sequence[int],
    sizes: Cut | None = None,
    x: torch.Tensor | None = None,
    batches: Sequence[int] = (),
    agreement: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    assert_same_as_sequential(
        lambda: torch.nn.Upsample(**options),
        lambda: nn.DistributedUpsample(P_x, **options, **(agreement or {})),
        P_x,
        P_x,
        shape,
        sizes=sizes,
        output_sizes={d: blocks for d, blocks in (sizes or {}).items() if d < 2},
        x=x,
        batches=batches,
    )


# Extents and what torch rounds in several ways: 1 / 2.3, 7 / 6, the scale of as many outputs.
ROUNDED: list[tuple[Sequence[int], dict[str, Any]]] = [
    ((77,), {"size": 66}),
    ((143,), {"scale_factor": 2.3}),
    ((8,), {"scale_factor": 1.05}),
    ((8,), {"scale_factor": 2.05}),
    ((300,), {"scale_factor": 1 / 3}),
    ((77, 12), {"size": (66, 60)}),
    ((77, 12), {"size": (66, 70)}),
    ((8, 7), {"scale_factor": 1.05}),
    ((8, 7), {"scale_factor": 2.05}),
    ((8, 60), {"scale_factor": 2.05}),
    ((143, 3), {"scale_factor": 2.3}),
    ((19, 3), {"scale_factor": 2.3}),
    ((8, 3, 5), {"scale_factor": 1.05}),
    ((43, 3, 5), {"scale_factor": 2.3}),
]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.uint8]


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
@distributed(ranks=3, transports=LOOPBACK)
def test_the_nearest_cell_is_torchs_in_every_dtype(P_world: Partition, mode: str) -> None:
    for extents, way in ROUNDED:
        P_x = grid(P_world, [1, 1, 3, *(1 for _ in extents[1:])])
        for dtype in DTYPES:
            whole = torch.randint(0, 255, (1, 2, *extents), generator=torch.Generator()).to(dtype)
            expected = F.interpolate(whole, mode=mode, **way)
            layer = nn.DistributedUpsample(P_x, mode=mode, **way)
            y = layer(own_block(whole, P_x, requires_grad=False))
            assert y.dtype == dtype
            where = own_slices(expected.shape, P_x)
            assert_block_of(y, expected, where, f"{extents}, {way}, {dtype}", 0)


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
@distributed(ranks=3, transports=LOOPBACK)
def test_the_gradient_is_the_adjoint_where_torchs_is_not(P_world: Partition, mode: str) -> None:
    extent, scale = 143, 2.3
    P_x = grid(P_world, [1, 1, 3])
    whole = random_like_all((1, 1, extent), 1).requires_grad_()
    cells = F.interpolate(torch.arange(extent).double()[None, None], None, scale, mode)[0, 0].long()
    cotangent = random_like_all((1, 1, len(cells)), 2)
    expected = torch.zeros_like(whole).index_add(2, cells, cotangent).detach()
    F.interpolate(whole, None, scale, mode).backward(cotangent)
    assert not torch.allclose(gradient_of(whole), expected), "torch has changed: say so no longer"
    block = own_block(whole, P_x)
    y = nn.DistributedUpsample(P_x, None, scale, mode)(block)
    y.backward(cotangent[own_slices(cotangent.shape, P_x)])
    assert_block_of(block.grad, expected, own_slices(whole.shape, P_x), "input gradient", 1e-12)


@distributed(ranks=2, transports=LOOPBACK)
def test_the_gradient_of_bicubic_asks_for_the_scale_factor(P_world: Partition) -> None:
    """Torch's does not where the extents stay; nothing here may depend on the partition."""
    whole = random_like_all((2, 1, 5, 4), 1).requires_grad_()
    cotangent = random_like_all(whole.shape, 2)
    units = torch.eye(20, dtype=torch.float64).view(20, 1, 5, 4)
    outputs = F.interpolate(units, None, 1.05, "bicubic").flatten(1)
    assert outputs.shape == (20, 20)
    expected = (cotangent.flatten(1) @ outputs.T).view_as(whole)
    F.interpolate(whole, None, 1.05, "bicubic").backward(cotangent)
    assert not torch.allclose(gradient_of(whole), expected), "torch has changed: say so no longer"
    for shape in ([2, 1, 1, 1], [1, 1, 2, 1]):
        P_x = grid(P_world, shape)
        block, where = own_block(whole, P_x), own_slices(whole.shape, P_x)
        nn.DistributedUpsample(P_x, None, 1.05, "bicubic")(block).backward(cotangent[where])
        assert_block_of(block.grad, expected, where, "input gradient", 1e-12)


@pytest.mark.parametrize(
    "dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)]
)
@pytest.mark.parametrize("mode", ["bilinear", "bicubic", "area"])
@distributed(ranks=2, transports=LOOPBACK)
def test_weights_in_every_dtype(
    P_world: Partition, mode: str, dtype: torch.dtype, tolerance: float
) -> None:
    P_x = grid(P_world, [1, 1, 2, 1])
    whole = random_like_all((2, 3, 9, 6), 1).to(dtype)
    for size in ((18, 12), (11, 4)):
        expected = F.interpolate(whole, size, mode=mode)
        y = nn.DistributedUpsample(P_x, size, mode=mode)(own_block(whole, P_x))
        assert y.dtype == dtype
        where = own_slices(expected.shape, P_x)
        assert_block_of(y.detach(), expected, where, f"output of {size}", tolerance)


def movements_before(y: torch.Tensor) -> list[str]:
    """The movements in the graph of ``y``, which is a chain; a copy without a message is one."""
    names: list[str] = []
    node: Any = y.grad_fn
    while node is not None:
        names.append(node.name())
        node = next((parent for parent, _ in node.next_functions if parent is not None), None)
    return [name for name in names if not name.endswith("Backward0") and "Accumulate" not in name]


@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic", "area"])
@distributed(ranks=4)
def test_nothing_moves_where_no_output_reads_cells_of_others(P_world: Partition, mode: str) -> None:
    P_split, P_batch = grid(P_world, [1, 1, 2, 2]), grid(P_world, [2, 2, 1, 1])
    P_x = P_split if mode in ("nearest", "area") else P_batch
    x = torch.randn(2, 2, 6, 6, requires_grad=True)
    layer = nn.DistributedUpsample(P_x, scale_factor=2, mode=mode)
    y = layer(x)
    before = P_world.wire.recorder.lines(last=1)
    assert torch.equal(layer(x), y)
    assert P_world.wire.recorder.lines(last=1) == before
    assert movements_before(y) == []
    y = nn.DistributedUpsample(P_split, scale_factor=2, mode="bilinear")(x)
    assert len(movements_before(y)) == 1


@distributed(ranks=2, transports=LOOPBACK)
def test_an_output_is_a_new_contiguous_tensor(P_world: Partition) -> None:
    P_x = grid(P_world, [1, 1, 2, 1])
    for mode in ("nearest", "bilinear", "bicubic", "area"):
        for scale in (1, 2, 3):
            x = torch.randn(2, 2, 3, 4)
            y = nn.DistributedUpsample(P_x, scale_factor=scale, mode=mode)(x)
            assert y.is_contiguous() and y.shape == (2, 2, 3 * scale, 4 * scale)
            assert y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr(), (mode, scale)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "size is None and scale_factor None; give one of them"),
    ({"size": 3, "scale_factor": 2}, "give one of them"),
    ({"size": (3, 4)}, "size has 2 entries but P_x has 1 dims"),
    ({"scale_factor": (2.0, 2.0)}, "scale_factor has 2 entries"),
    ({"size": 0}, "dim 2: size 0 must be above 0"),
    ({"size": 2.5}, r"size is 2\.5 .*takes an integer"),
    ({"scale_factor": -1.5}, "dim 2: scale_factor -1.5 must be above 0"),
    ({"scale_factor": float("nan")}, "dim 2: scale_factor nan must be above 0"),
    ({"size": 3, "mode": "cubic"}, "mode 'cubic' is not supported"),
    ({"size": 3, "mode": "area", "align_corners": False}, "is given for mode 'area'"),
    ({"size": 3, "align_corners": True}, "is given for mode 'nearest'"),
    ({"size": 3, "recompute_scale_factor": True}, "recompute_scale_factor needs a scale_factor"),
]


@distributed(ranks=2, transports=LOOPBACK)
def test_arguments_without_a_meaning_are_refused(P_world: Partition) -> None:
    P_x = grid(P_world, [1, 1, 2])
    for options, message in REFUSED:
        with pytest.raises(ShapeError, match=message):
            nn.DistributedUpsample(P_x, **options)
    for mode in ("bilinear", "trilinear", "bicubic"):
        with pytest.raises(PartitionError, match=f"mode '{mode}' takes [23] dims"):
            nn.DistributedUpsample(P_x, 3, mode=mode)
    for layer in (nn.DistributedUpsamplingNearest2d, nn.DistributedUpsamplingBilinear2d):
        with pytest.raises(PartitionError, match="of features"):
            layer(P_x, 3)
    with pytest.raises(PartitionError, match="takes 1 to 3 dims"):
        nn.DistributedUpsample(grid(P_world, [1, 2]), 3)


@distributed(ranks=4, transports=LOOPBACK)
def test_an_input_without_outputs_is_refused_on_every_rank(P_world: Partition) -> None:
    P_x = grid(P_world, [1, 1, 4])
    with pytest.raises(ShapeError, match=r"dim 2: 5 cells with scale_factor 0\.1 have no output"):
        nn.DistributedUpsample(P_x, None, 0.1)(own_block(random_like_all((2, 2, 5), 0), P_x))
    with pytest.raises(ShapeError, match="dim 2: 0 cells with size 3 have no output"):
        nn.DistributedUpsample(P_x, 3)(own_block(random_like_all((2, 2, 0), 0), P_x))
    with pytest.raises(ShapeError, match=r"does not interpolate torch\.int64 by 'linear'"):
        nn.DistributedUpsample(P_x, 3, mode="linear")(torch.arange(2).view(1, 1, 2))
    with pytest.raises(ShapeError, match=r"does not interpolate torch\.int64 by 'area'"):
        nn.DistributedUpsample(P_x, 3, mode="area")(torch.arange(2).view(1, 1, 2))


NETWORK: list[dict[str, Any]] = [
    {"scale_factor": 2, "mode": "bilinear"},
    {"size": (9, 17), "mode": "nearest"},
    {"size": (5, 12), "mode": "bilinear", "align_corners": True},
    {"size": (2, 7), "mode": "area"},
]


def networks(P_x: CartesianPartition) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Every kind of local computation, with something to differentiate twice between them."""
    layers, blocks = [], []
    for options in NETWORK:
        layers += [torch.nn.Upsample(**options), torch.nn.Tanh()]
        blocks += [nn.DistributedUpsample(P_x, **options), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers), torch.nn.Sequential(*blocks)


@distributed(ranks=4)
def test_double_backward(P_world: Partition) -> None:
    """Worker 2 of three has no output in the network's last layer, and rank 1 has no part."""
    P_x = grid(P_world, [1, 1, 3, 1], [3, 2, 0])
    whole = random_like_all((2, 2, 5, 4), 1).requires_grad_()
    block = own_block(whole, P_x)
    for model, x in zip(networks(P_x), (whole, block), strict=True):
        (gradient,) = torch.autograd.grad(model(x).pow(3).sum(), x, create_graph=True)
        gradient.pow(2).sum().backward()
    where = own_slices(whole.shape, P_x)
    assert_block_of(block.grad, gradient_of(whole), where, "gradient of the penalty")
