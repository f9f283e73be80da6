"""Distributed pooling is the sequential one, ties included."""

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

MAX = {1: torch.nn.MaxPool1d, 2: torch.nn.MaxPool2d, 3: torch.nn.MaxPool3d}
AVERAGE = {1: torch.nn.AvgPool1d, 2: torch.nn.AvgPool2d, 3: torch.nn.AvgPool3d}
DISTRIBUTED: dict[str, Any] = {
    "max": {1: nn.DistributedMaxPool1d, 2: nn.DistributedMaxPool2d, 3: nn.DistributedMaxPool3d},
    "average": {1: nn.DistributedAvgPool1d, 2: nn.DistributedAvgPool2d, 3: nn.DistributedAvgPool3d},
}
SEQUENTIAL: dict[str, Any] = {"max": MAX, "average": AVERAGE}


def check(
    kind: str,
    P_x: CartesianPartition,
    *arguments: Any,
    shape: Sequence[int],
    sizes: Cut | None = None,
    output_sizes: Cut | None = None,
    x: torch.Tensor | None = None,
    batches: Sequence[int] = (),
    nested: bool = False,
    **options: Any,
) -> None:
    dims = len(shape) - 2
    assert_same_as_sequential(
        lambda: SEQUENTIAL[kind][dims](*arguments, **options),
        lambda: DISTRIBUTED[kind][dims](P_x, *arguments, **options, nested=nested),
        P_x,
        P_x,
        shape,
        sizes=sizes,
        output_sizes=output_sizes,
        x=x,
        batches=batches,
        tolerance=1e-12,
    )


@distributed(ranks=4, transports=["loopback"])
def test_divisor_override_1d(P_world: Partition) -> None:
    """Torch's layer has none in one dim."""
    P_x = grid(P_world, [1, 1, 4])
    layer = nn.DistributedAvgPool1d(P_x, 3, 2, 1, divisor_override=7)
    whole = random_like_all((2, 2, 9), 1)
    y = F.avg_pool1d(whole, 3, 2, 1) * 3 / 7
    assert_block_of(layer(own_block(whole, P_x)).detach(), y, own_slices(y.shape, P_x), "output")


@distributed(ranks=2, transports=["loopback"])
def test_unsupported_arguments_are_refused(P_world: Partition) -> None:
    P_x = grid(P_world, [1, 1, 2])
    for kind in ("max", "average"):
        pool = DISTRIBUTED[kind][1]
        with pytest.raises(ShapeError, match="Pool1d: kernel 2, stride 0 and dilation 1 must"):
            pool(P_x, 2, 0)
        with pytest.raises(ShapeError, match="dim 2: padding 2 is more than half of the kernel 3"):
            pool(P_x, 3, 1, 2)
        with pytest.raises(PartitionError, match="needs 4 axes"):
            DISTRIBUTED[kind][2](P_x, 2)
        with pytest.raises(ShapeError, match="stride has 2 entries"):
            pool(P_x, 2, (1, 1))
    with pytest.raises(ShapeError, match="divisor_override is 0"):
        nn.DistributedAvgPool1d(P_x, 2, divisor_override=0)


@pytest.mark.parametrize("kind", DISTRIBUTED)
@distributed(ranks=4, transports=["loopback"])
def test_a_kernel_that_does_not_fit_is_refused_on_every_rank(P_world: Partition, kind: str) -> None:
    P_x = grid(P_world, [1, 1, 4])
    with pytest.raises(ShapeError, match=r"Pool1d: .*needs 7 cells but the padded .* is 5"):
        DISTRIBUTED[kind][1](P_x, 7)(own_block(random_like_all((2, 2, 5), 0), P_x))
    with pytest.raises(ShapeError, match="no output for a padded global extent of 5, even in ceil"):
        DISTRIBUTED[kind][1](P_x, 7, 1, ceil_mode=True)(own_block(torch.zeros(2, 2, 5), P_x))
    with pytest.raises(ShapeError, match="Pool1d, dim 1: the input has no cells"):
        DISTRIBUTED[kind][1](P_x, 2)(own_block(torch.zeros(2, 0, 5), P_x))


@distributed(ranks=2, transports=["loopback"])
def test_a_block_smaller_than_the_kernel_3d(P_world: Partition) -> None:
    """Torch's mean in three dims refuses one, and its whole tensor, even if it is padded."""
    P_x = grid(P_world, [1, 1, 1, 1, 2])
    check("average", P_x, 3, 3, 1, shape=(1, 2, 4, 4, 5), sizes={4: [2, 3]})
    check("max", P_x, 3, 3, 1, shape=(1, 2, 4, 4, 5), sizes={4: [2, 3]})
    for extents in ((4, 4, 2), (2, 4, 4)):
        x = own_block(torch.zeros(1, 1, *extents), P_x)
        with pytest.raises(ShapeError, match=r"AvgPool3d, dim .: the kernel 3 is larger than"):
            nn.DistributedAvgPool3d(P_x, 3, 1, 1)(x)


@distributed(ranks=2, transports=["loopback"])
def test_a_window_of_padding_alone_is_refused(P_world: Partition) -> None:
    """Torch's layer gives it an index beyond the input."""
    P_x = grid(P_world, [1, 1, 2])
    with pytest.raises(ShapeError, match=r"MaxPool1d, dim 2: .* over 2 cells holds padding only"):
        nn.DistributedMaxPool1d(P_x, 2, 1, 1, 3)(own_block(torch.zeros(1, 1, 2), P_x))


@pytest.mark.parametrize("kind", DISTRIBUTED)
@distributed(ranks=4)
def test_a_block_without_ghosts_is_never_copied(P_world: Partition, kind: str) -> None:
    P_split, P_batch = grid(P_world, [1, 1, 2, 2]), grid(P_world, [4, 1, 1, 1])
    options: dict[str, Any] = {} if kind == "max" else {"count_include_pad": False}
    x = torch.randn(4, 2, 6, 6, requires_grad=True)
    for P_x, window in ((P_split, (2, 2)), (P_split, (1, 3)), (P_batch, (3, 2, 1))):
        layer = DISTRIBUTED[kind][2](P_x, *window, **options)
        layer(x)
        before = P_world.wire.recorder.lines(last=1)
        node: Any = layer(x).grad_fn
        while "Pool" not in node.name():
            node = node.next_functions[0][0]
        assert node._saved_self.data_ptr() == x.data_ptr()
        assert P_world.wire.recorder.lines(last=1) == before
        check(kind, P_x, *window, shape=(4, 2, 12, 12), **options)
    layer = DISTRIBUTED[kind][2](P_split, 3, 2, 1)
    layer(x)
    before = P_world.wire.recorder.lines(last=1)
    layer(x)
    assert P_world.wire.recorder.lines(last=1) != before


@pytest.mark.parametrize("power", [1, 3])
@pytest.mark.parametrize("kind", DISTRIBUTED)
@distributed(ranks=4)
def test_double_backward(P_world: Partition, kind: str, power: int) -> None:
    P_x = grid(P_world, [1, 1, 4])
    whole = random_like_all((2, 2, 5), 1).requires_grad_()
    block = own_block(whole, P_x)
    sequential, layer = SEQUENTIAL[kind][1](3, 2), DISTRIBUTED[kind][1](P_x, 3, 2)
    for model, x in ((sequential, whole), (layer, block)):
        (gradient,) = torch.autograd.grad(model(x).pow(power).sum(), x, create_graph=True)
        gradient.pow(2).sum().backward()
    where = own_slices(whole.shape, P_x)
    assert_block_of(block.grad, gradient_of(whole), where, "gradient of the penalty")


@distributed(ranks=2, transports=["loopback"])
def test_maxima_of_integers(P_world: Partition) -> None:
    P_x = grid(P_world, [1, 1, 2])
    whole = torch.arange(-9, 9).view(1, 2, 9)
    for window in ((3, 1, 1), (3, 2, 1), (2, 2)):
        y = DISTRIBUTED["max"][1](P_x, *window)(own_block(whole, P_x, requires_grad=False))
        expected = SEQUENTIAL["max"][1](*window)(whole.float()).long()
        assert_block_of(y, expected, own_slices(expected.shape, P_x), "output")
