"""Distributed adaptive pools are the sequential ones, and never gather a window."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

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
from tests.nn.pool.test_pool_indices import check_with_indices
from tests.pool import distributed

SEQUENTIAL: dict[str, Any] = {
    "max": [torch.nn.AdaptiveMaxPool1d, torch.nn.AdaptiveMaxPool2d, torch.nn.AdaptiveMaxPool3d],
    "average": [torch.nn.AdaptiveAvgPool1d, torch.nn.AdaptiveAvgPool2d, torch.nn.AdaptiveAvgPool3d],
}
DISTRIBUTED: dict[str, Any] = {
    "max": [
        nn.DistributedAdaptiveMaxPool1d,
        nn.DistributedAdaptiveMaxPool2d,
        nn.DistributedAdaptiveMaxPool3d,
    ],
    "average": [
        nn.DistributedAdaptiveAvgPool1d,
        nn.DistributedAdaptiveAvgPool2d,
        nn.DistributedAdaptiveAvgPool3d,
    ],
}


def check(
    kind: str,
    P_x: CartesianPartition,
    size: Any,
    input_shape: Sequence[int],
    sizes: Cut | None = None,
    x: torch.Tensor | None = None,
    **options: Any,
) -> None:
    """Values and gradients; of a maximum also the indices, which must not change either."""
    of, own = (layers[kind][len(input_shape) - 3] for layers in (SEQUENTIAL, DISTRIBUTED))
    keep = None if sizes is None else {d: cut for d, cut in sizes.items() if d < 2}
    assert_same_as_sequential(
        lambda: of(size), lambda: own(P_x, size, **options),
        P_x, P_x, input_shape, sizes=sizes, output_sizes=keep, x=x, tolerance=1e-12,
    )  # fmt: skip
    if kind == "max":
        layer = own(P_x, size, return_indices=True, **options)
        sequential = of(size, return_indices=True)
        check_with_indices(sequential, layer, P_x, input_shape, sizes, x, keep)


@pytest.mark.parametrize("kind", DISTRIBUTED)
@distributed(ranks=4, transports=["loopback"])
def test_no_outputs_and_no_batch(P_world: Partition, kind: str) -> None:
    P_x = grid(P_world, [1, 1, 2, 2])
    for size, shape in (((0, 2), (2, 3, 4, 4)), ((1, 3), (0, 2, 5, 7))):
        of, own = SEQUENTIAL[kind][1], DISTRIBUTED[kind][1]
        expected = of(size)(torch.zeros(shape, dtype=torch.float64))
        y = own(P_x, size)(own_block(torch.zeros(shape, dtype=torch.float64), P_x))
        assert_block_of(y.detach(), expected, own_slices(expected.shape, P_x), "output")


@distributed(ranks=4, transports=["loopback"])
def test_ties_nan_and_minus_infinity(P_world: Partition) -> None:
    P_x = grid(P_world, [1, 1, 2, 2])
    draws = torch.randint(0, 4, (2, 2, 9, 11), generator=torch.Generator().manual_seed(0))
    few = draws.double()
    nothing = torch.full_like(few, -torch.inf)
    for size in (1, 2, (3, 4), (4, 3), (5, None), (13, 2)):
        for x in (few, torch.zeros_like(few), nothing, torch.where(draws > 2, few, nothing)):
            check("max", P_x, size, few.shape, x=x)
        with_nan = torch.where(draws > 2, torch.nan, few)
        y, indices = torch.nn.AdaptiveMaxPool2d(size, return_indices=True)(with_nan)
        layer = nn.DistributedAdaptiveMaxPool2d(P_x, size, return_indices=True)
        own = layer(own_block(with_nan, P_x))
        where = own_slices(y.shape, P_x)
        assert where is not None
        assert torch.equal(own[1], indices[where])
        torch.testing.assert_close(own[0].detach(), y[where], equal_nan=True)


@pytest.mark.parametrize("power", [1, 3])
@pytest.mark.parametrize("outputs", [1, 2, 4])
@pytest.mark.parametrize("kind", DISTRIBUTED)
@distributed(ranks=4, transports=["loopback", "host"])
def test_double_backward(P_world: Partition, kind: str, outputs: int, power: int) -> None:
    """Ranks with and without outputs, parts of others and adaptive kernels of torch."""
    P_x = grid(P_world, [1, 1, 2, 2])
    whole = random_like_all((2, 2, 6, 7), 1).requires_grad_()
    block = own_block(whole, P_x, {3: [1, 6]})
    sequential, layer = SEQUENTIAL[kind][1](outputs), DISTRIBUTED[kind][1](P_x, outputs)
    for model, x in ((sequential, whole), (layer, block)):
        (gradient,) = torch.autograd.grad(model(x).pow(power).sum(), x, create_graph=True)
        (gradient * x).pow(2).sum().backward()
    where = own_slices(whole.shape, P_x, {3: [1, 6]})
    assert_block_of(block.grad, gradient_of(whole), where, "gradient of the penalty")


@pytest.mark.parametrize("kind", DISTRIBUTED)
@distributed(ranks=4, transports=["loopback"])
def test_a_global_pool_moves_one_number_a_worker(P_world: Partition, kind: str) -> None:
    P_x = grid(P_world, [1, 1, 2, 2])
    layer = DISTRIBUTED[kind][1](P_x, 1)
    x = own_block(random_like_all((2, 3, 64, 64), 1), P_x)
    layer(x)
    (bound,) = layer._bindings._results.values()
    sent: list[int] = []
    for step in bound.steps:
        movement = step.movement if kind == "average" else step.movements[0]
        (stage,) = [step.stage for step in movement.steps]
        sent.append(sum(message.volume for message in stage.sends))
    assert P_x.index is not None
    *_, row, column = P_x.index
    # One number per row to the left, then one number upwards.
    assert sent == [2 * 3 * 32 if column else 0, 2 * 3 if row and not column else 0]


@pytest.mark.parametrize("kind", DISTRIBUTED)
@distributed(ranks=4, transports=["loopback"])
def test_windows_within_blocks_move_nothing(P_world: Partition, kind: str) -> None:
    P_x = grid(P_world, [1, 1, 2, 2])
    layer = DISTRIBUTED[kind][1](P_x, (4, None))
    x = own_block(random_like_all((2, 3, 12, 5), 1), P_x)
    layer(x)
    before = P_world.wire.recorder.lines(last=1)
    layer(x)
    assert P_world.wire.recorder.lines(last=1) == before
    check(kind, P_x, (4, None), (2, 3, 12, 5))
    check(kind, grid(P_world, [4, 1, 1, 1]), 3, (5, 2, 7, 8))


@distributed(ranks=3, transports=["loopback"])
def test_a_mean_of_half_precision_does_not_overflow(P_world: Partition) -> None:
    P_x = grid(P_world, [1, 1, 3])
    x = own_block(torch.full((1, 2, 11), 6e4, dtype=torch.float16), P_x)
    for size in (1, 2, 4):
        y = nn.DistributedAdaptiveAvgPool1d(P_x, size)(x).detach()
        torch.testing.assert_close(y, torch.full_like(y, 6e4), rtol=2e-3, atol=0)


@pytest.mark.parametrize("kind", DISTRIBUTED)
@distributed(ranks=2, transports=["loopback"])
def test_what_is_not_supported_is_refused(P_world: Partition, kind: str) -> None:
    one, two, _ = DISTRIBUTED[kind]
    P_x, P_2d = grid(P_world, [1, 1, 2]), grid(P_world, [1, 1, 2, 1])
    with pytest.raises(PartitionError, match=r"Pool2d: .* needs 4 axes"):
        two(P_x, 2)
    with pytest.raises(ShapeError, match="output_size has 1 entries but the layer has 2 dims"):
        two(P_2d, (3,))
    with pytest.raises(ShapeError, match="dim 3: output_size -1 must be at least 0"):
        two(P_2d, (3, -1))
    with pytest.raises(ShapeError, match="dim 2: output_size is None"):
        one(P_x, (None,))
    with pytest.raises(ShapeError, match="Pool1d, dim 2: the input has no cells"):
        one(P_x, 2)(own_block(torch.zeros(2, 2, 0), P_x))
