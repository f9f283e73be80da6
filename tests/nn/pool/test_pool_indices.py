"""Indices of the maxima are the sequential layer's, and so are the gradients at ties."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from gpudist import nn
from gpudist.world.partition import CartesianPartition, Partition
from tests.nn.compare import (
    Cut,
    assert_same_as_sequential,
    grid,
    own_block,
    own_slices,
    random_like_all,
)
from tests.nn.pool.test_pool import DISTRIBUTED, MAX
from tests.pool import distributed


class KeepsIndices(torch.nn.Module):
    """A pool that returns indices, which gives the output alone."""

    def __init__(self, pool: torch.nn.Module) -> None:
        super().__init__()
        self.pool = pool
        self.indices = torch.empty(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, self.indices = self.pool(x)
        return y


def check_with_indices(
    sequential: torch.nn.Module,
    distributed: torch.nn.Module,
    P_x: CartesianPartition,
    shape: Sequence[int],
    sizes: Cut | None = None,
    x: torch.Tensor | None = None,
    output_sizes: Cut | None = None,
    tolerance: float = 1e-12,
) -> None:
    both = KeepsIndices(sequential), KeepsIndices(distributed)
    assert_same_as_sequential(
        lambda: both[0], lambda: both[1], P_x, P_x, shape,
        sizes=sizes, output_sizes=output_sizes, x=x, tolerance=tolerance,
    )  # fmt: skip
    expected, indices = both[0].indices, both[1].indices
    where = own_slices(expected.shape, P_x, output_sizes)
    assert indices.dtype == torch.int64
    if where is None:
        assert indices.numel() == 0
    else:
        assert torch.equal(indices, expected[where])


def check(P_x: CartesianPartition, *window: Any, shape: Sequence[int], **options: Any) -> None:
    sizes, x = options.pop("sizes", None), options.pop("x", None)
    dims = len(shape) - 2
    options["return_indices"] = True
    sequential = MAX[dims](*window, **options)
    layer = DISTRIBUTED["max"][dims](P_x, *window, **options)
    check_with_indices(sequential, layer, P_x, shape, sizes, x)


@pytest.mark.parametrize("window", [(2, 1), (3, 1, 1), (3, 2, 1), (4, 3, 2), (3, 2, 1, 2)])
@distributed(ranks=4, transports=["loopback"])
def test_ties_nan_and_windows_of_minus_infinity(P_world: Partition, window: Sequence[int]) -> None:
    P_x = grid(P_world, [1, 1, 2, 2])
    generator = torch.Generator().manual_seed(0)
    draws = torch.randint(0, 5, (2, 2, 10, 12), generator=generator)
    few = draws.double()
    without_finite = torch.full_like(few, -torch.inf)
    hardly_finite = torch.where(draws > 3, few, without_finite)
    with_nan = torch.where(draws > 3, torch.nan, few)
    for x in (few, torch.zeros_like(few), without_finite, hardly_finite):
        check(P_x, *window, shape=few.shape, x=x)
        assert_same_as_sequential(
            lambda: MAX[2](*window), lambda: DISTRIBUTED["max"][2](P_x, *window),
            P_x, P_x, few.shape, x=x, tolerance=1e-12,
        )  # fmt: skip
    whole = MAX[2](*window, return_indices=True)(with_nan)
    own = nn.DistributedMaxPool2d(P_x, *window, return_indices=True)(own_block(with_nan, P_x))
    where = own_slices(whole[1].shape, P_x)
    assert where is not None
    assert torch.equal(own[1], whole[1][where])
    assert torch.equal(own[0].isnan(), whole[0][where].isnan())


@distributed(ranks=3)
def test_double_backward_of_gathered_maxima(P_world: Partition) -> None:
    """Rank 2 has no output, and must still take part in what the others move."""
    P_x = grid(P_world, [1, 1, 3])
    whole = random_like_all((2, 2, 4), 1).requires_grad_()
    block = own_block(whole, P_x)
    layer = nn.DistributedMaxPool1d(P_x, 3, 2, 1)
    for model, x in ((torch.nn.MaxPool1d(3, 2, 1), whole), (layer, block)):
        (gradient,) = torch.autograd.grad(model(x).pow(3).sum(), x, create_graph=True)
        gradient.pow(2).sum().backward()
    assert whole.grad is not None and block.grad is not None
    where = own_slices(whole.shape, P_x)
    assert where is not None
    torch.testing.assert_close(block.grad, whole.grad[where], rtol=1e-12, atol=1e-12)
