"""Softmax along a split dim is the sequential one, in value and derivatives."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gpudist import nn
from gpudist.errors import GpudistError, PartitionError, ShapeError
from gpudist.world.partition import Partition
from tests.nn.compare import (
    assert_block_of,
    grid,
    own_block,
    own_slices,
    random_like_all,
)
from tests.pool import distributed


def layers(kind: str, P_x: Any, *options: Any) -> tuple[torch.nn.Module, torch.nn.Module]:
    return getattr(torch.nn, kind)(*options), getattr(nn, f"Distributed{kind}")(P_x, *options)


def special(kind: str) -> torch.Tensor:
    x = random_like_all((3, 6), 1)
    if kind == "large":
        return 1e4 * x
    if kind == "masked":
        x[0, 1:5] = -torch.inf
        x[1, :3] = -torch.inf
    elif kind == "all masked":
        x[1] = -torch.inf
    elif kind == "inf":
        x[1, 4] = torch.inf
    else:
        x[1, 2] = torch.nan
    return x


@pytest.mark.parametrize("values", ["large", "masked", "all masked", "inf", "nan"])
@pytest.mark.parametrize("kind", ["Softmax", "LogSoftmax"])
@distributed(ranks=3, transports=["loopback", "host"])
def test_special_values(P_world: Partition, kind: str, values: str) -> None:
    """Nothing overflows, and the same cells as in torch are NaN."""
    P_x = grid(P_world, (1, 3))
    sequential, layer = layers(kind, P_x, 1)
    whole = special(values).requires_grad_()
    block = own_block(whole, P_x)
    where = own_slices(whole.shape, P_x)
    assert where is not None
    y_whole, y = sequential(whole), layer(block)
    torch.testing.assert_close(y, y_whole[where], rtol=1e-12, atol=1e-12, equal_nan=True)
    cotangent = random_like_all((3, 6), 2)
    y_whole.backward(cotangent)
    y.backward(cotangent[where])
    assert whole.grad is not None and block.grad is not None
    torch.testing.assert_close(
        block.grad, whole.grad[where], rtol=1e-12, atol=1e-12, equal_nan=True
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@distributed(ranks=3, transports=["loopback"])
def test_few_digits(P_world: Partition, dtype: torch.dtype) -> None:
    """Sums of many cells keep the digits of the dtype."""
    P_x = grid(P_world, (1, 3))
    whole = random_like_all((2, 3000), 1).to(dtype)
    for kind in ("Softmax", "LogSoftmax"):
        sequential, layer = layers(kind, P_x, 1)
        y = layer(own_block(whole, P_x))
        assert y.dtype == dtype
        torch.testing.assert_close(
            y.detach(), sequential(whole)[own_slices(whole.shape, P_x) or ()]
        )


@distributed(ranks=3, transports=["loopback"])
def test_the_split_dim_may_grow(P_world: Partition) -> None:
    P_x = grid(P_world, (1, 3))
    sequential, layer = layers("Softmax", P_x, 1)
    for cells in (4, 9, 2):
        x = random_like_all((2, cells), cells)
        y = layer(own_block(x, P_x)).detach()
        assert_block_of(y, sequential(x), own_slices(x.shape, P_x), "output")


@distributed(ranks=4, transports=["loopback"])
def test_what_does_not_fit_is_refused(P_world: Partition) -> None:
    P_x = grid(P_world, (2, 2))
    with pytest.raises(ShapeError, match="DistributedSoftmax: dim is None"):
        nn.DistributedSoftmax(P_x)
    with pytest.raises(PartitionError, match=r"DistributedLogSoftmax: dim 2 is not one of the 2"):
        nn.DistributedLogSoftmax(P_x, 2)
    with pytest.raises(PartitionError, match="DistributedSoftmax2d: P_x has shape"):
        nn.DistributedSoftmax2d(P_x)
    with pytest.raises(ShapeError, match=r"\[2, 2, 2\] has 3 dims, not 2"):
        nn.DistributedSoftmin(P_x, 1)(torch.randn(2, 2, 2))
    with pytest.raises(ShapeError, match="int64 but must be floating point"):
        nn.DistributedSoftmax(P_x, 1)(torch.zeros(2, 2, dtype=torch.int64))


@distributed(ranks=3, transports=["loopback", "host"])
def test_lines_that_do_not_match_are_refused(P_world: Partition) -> None:
    layer = nn.DistributedSoftmax(grid(P_world, (1, 3)), 1)
    with pytest.raises(GpudistError, match=r"DistributedSoftmax.*do not form one tensor"):
        layer(torch.randn(2 if P_world.rank else 3, 2))


@distributed(ranks=3, transports=["host"])
def test_forward_mode(P_world: Partition) -> None:
    P_x = grid(P_world, (1, 2), [2, 0])
    softmax, log_softmax = nn.DistributedSoftmax(P_x, 1), nn.DistributedLogSoftmax(P_x, 1)
    whole, tangent = random_like_all((2, 5), 1), random_like_all((2, 5), 2)
    x, t = (own_block(z, P_x, requires_grad=False) for z in (whole, tangent))

    def sequential(x: torch.Tensor) -> torch.Tensor:
        return x.sin().softmax(1) * x.log_softmax(1)

    expected = torch.func.jvp(sequential, (whole,), (tangent,))[1]
    actual = torch.func.jvp(lambda x: softmax(x.sin()) * log_softmax(x), (x,), (t,))[1]
    assert_block_of(actual, expected, own_slices(whole.shape, P_x), "tangent", 1e-12)
