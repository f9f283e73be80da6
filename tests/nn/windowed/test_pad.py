"""The distributed padding layers are the sequential ones, however the tensor is cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from gpudist import nn
from gpudist.errors import PartitionError, ShapeError
from gpudist.world.partition import Partition
from tests.nn.affine.test_conv_graph import operations
from tests.nn.compare import (
    assert_block_of,
    grid,
    own_block,
    own_slices,
    random_like_all,
)
from tests.pool import distributed

F64 = torch.float64
KINDS = ["Zero", "Constant", "Reflection", "Replication", "Circular"]
COPYING = ["Reflection", "Replication", "Circular"]


def arguments(kind: str, padding: Any) -> tuple[Any, ...]:
    return (padding, 1.5) if kind == "Constant" else (padding,)


@pytest.mark.parametrize("kind", KINDS)
@distributed(ranks=4, transports=["loopback"])
def test_double_backward(P_world: Partition, kind: str) -> None:
    """Differentiate a cube twice, with an empty input and an output that is only padding."""
    P_x = grid(P_world, [1, 1, 4])
    name = f"{kind}Pad1d"
    whole = random_like_all((2, 2, 3), 1).requires_grad_()
    block = own_block(whole, P_x)
    sequential = getattr(torch.nn, name)(*arguments(kind, 2))
    layer = getattr(nn, f"Distributed{name}")(P_x, *arguments(kind, 2))
    for model, x in ((sequential, whole), (layer, block)):
        (gradient,) = torch.autograd.grad(model(x).pow(3).sum(), x, create_graph=True)
        gradient.pow(2).sum().backward()
    assert whole.grad is not None
    assert_block_of(block.grad, whole.grad, own_slices(whole.shape, P_x), "input")


@pytest.mark.parametrize("kind", KINDS)
@distributed(ranks=4, transports=["loopback"])
def test_one_group_of_messages(P_world: Partition, kind: str) -> None:
    P_x = grid(P_world, [1, 1, 4])
    layer = getattr(nn, f"Distributed{kind}Pad1d")(P_x, *arguments(kind, 2))
    x = torch.randn(2, 3, 4, requires_grad=True)
    layer(x)
    before = operations(P_world)
    layer(x).sum().backward()
    assert operations(P_world) == before + 2


@pytest.mark.parametrize("kind", KINDS)
@distributed(ranks=2, transports=["loopback"])
def test_channels_last_stays(P_world: Partition, kind: str) -> None:
    for dims, form in ((2, torch.channels_last), (3, torch.channels_last_3d)):
        layer = getattr(nn, f"Distributed{kind}Pad{dims}d")(
            grid(P_world, [1, 1, 2, *(1,) * (dims - 1)]), *arguments(kind, 1)
        )
        x = torch.randn(2, 3, 3, *(4, 4)[: dims - 1])
        for given in (form, torch.contiguous_format):
            y = layer(x.to(memory_format=given))
            assert y.is_contiguous(memory_format=given)


@pytest.mark.parametrize("kind", KINDS)
@distributed(ranks=3, transports=["loopback"])
def test_the_output_is_new_and_inactive_ranks_get_a_clone(P_world: Partition, kind: str) -> None:
    layer = getattr(nn, f"Distributed{kind}Pad1d")(grid(P_world, [2, 1, 1]), *arguments(kind, 0))
    x = torch.randn(2, 3, 4)
    y = layer(x)
    assert torch.equal(x, y) and x.data_ptr() != y.data_ptr()


@distributed(ranks=2, transports=["loopback"])
def test_arguments_that_do_not_fit_are_refused(P_world: Partition) -> None:
    P_x = grid(P_world, [1, 1, 2])
    with pytest.raises(
        PartitionError, match=r"DistributedZeroPad2d: P_x has shape .* needs 4 axes"
    ):
        nn.DistributedZeroPad2d(P_x, 1)
    for padding in ((1, 1, 1), (1,), 1.5, (1.5, 1)):
        with pytest.raises(
            ShapeError,
            match=r"DistributedReflectionPad1d: padding is .*( or 2: left|it takes an integer)",
        ):
            nn.DistributedReflectionPad1d(P_x, padding)  # type: ignore[arg-type]
    with pytest.raises(
        ShapeError, match=r"DistributedCircularPad1d, dim 2: padding \(-1, 2\) crops"
    ):
        nn.DistributedCircularPad1d(P_x, (-1, 2))


@pytest.mark.parametrize(
    "kind, padding, message",
    [
        ("Reflection", (0, 0, 4, 0), r"dim 2: reflected padding \(4, 0\) must be less than .* 4"),
        ("Reflection", (-3, -3, 0, 0), r"dim 3: padding \(-3, -3\) .* must leave one, .* 6"),
        ("Replication", (0, -6, 0, 0), r"dim 3: padding \(0, -6\) .* must leave one, .* 6"),
        ("Circular", (0, 7, 0, 0), r"dim 3: circular padding \(0, 7\) must be at most .* 6"),
        ("Zero", (0, 0, -3, -2), r"dim 2: padding \(-3, -2\) crops more cells than .* 4"),
        ("Constant", (0, 0, -5, 9), r"dim 2: padding \(-5, 9\) crops more cells than .* 4"),
    ],
)
@distributed(ranks=4, transports=["loopback"])
def test_padding_that_does_not_fit_is_refused_on_every_rank(
    P_world: Partition, kind: str, padding: tuple[int, ...], message: str
) -> None:
    P_x = grid(P_world, [1, 1, 2, 2])
    layer = getattr(nn, f"Distributed{kind}Pad2d")(P_x, *arguments(kind, padding))
    with pytest.raises(ShapeError, match=f"Distributed{kind}Pad2d, {message}"):
        layer(own_block(random_like_all((2, 3, 4, 6), 0), P_x))


@distributed(ranks=2, transports=["loopback"])
def test_other_dtypes(P_world: Partition) -> None:
    """Cells are copied, so that numbers that torch's layers take no sum of will do."""
    P_x = grid(P_world, [1, 1, 2])
    whole = torch.arange(6).view(1, 1, 6)
    block = own_block(whole, P_x, requires_grad=False)
    layers: list[tuple[Callable[..., torch.nn.Module], list[int]]] = [
        (nn.DistributedReflectionPad1d, [2, 1, 0, 1, 2, 3, 4, 5, 4, 3]),
        (nn.DistributedReplicationPad1d, [0, 0, 0, 1, 2, 3, 4, 5, 5, 5]),
        (nn.DistributedCircularPad1d, [4, 5, 0, 1, 2, 3, 4, 5, 0, 1]),
        (nn.DistributedZeroPad1d, [0, 0, 0, 1, 2, 3, 4, 5, 0, 0]),
    ]
    for make, expected in layers:
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.complex64):
            y = make(P_x, 2)(block.to(dtype))
            where = own_slices((1, 1, 10), P_x)
            assert_block_of(y, torch.tensor([[expected]]).to(dtype), where, "output", 0)
