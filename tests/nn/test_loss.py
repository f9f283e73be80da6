"""Distributed losses: one value on every rank, bit by bit, and the sequential gradient, once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from gpudist.errors import PartitionError, ShapeError
from gpudist.nn import DistributedCrossEntropyLoss, DistributedL1Loss, DistributedMSELoss
from gpudist.partition import CartesianPartition, Partition
from tests.nn.compare import Cut, assert_block_of, grid, own_block, own_slices, random_like_all
from tests.pool import distributed

F64 = torch.float64
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
ELEMENT: dict[str, tuple[Any, Any]] = {
    "mse": (torch.nn.MSELoss, DistributedMSELoss),
    "l1": (torch.nn.L1Loss, DistributedL1Loss),
}


def classes_of(shape: Sequence[int], ignored: Sequence[int] = ()) -> torch.Tensor:
    """Random targets for logits of this shape; samples at ``ignored`` are."""
    generator = torch.Generator().manual_seed(3)
    target = torch.randint(0, shape[1], (shape[0], *shape[2:]), generator=generator)
    target.view(-1)[list(ignored)] = -100
    return target


def own_target(
    target: torch.Tensor, x_shape: Sequence[int], P_x: Partition, sizes: Cut | None
) -> torch.Tensor:
    """This rank's block of the target: the logits' box without the class dim."""
    where = own_slices(x_shape, P_x, sizes)
    if where is None:
        return target[:0]
    return target[where] if target.dim() == len(x_shape) else target[(where[0], *where[2:])]


def assert_same_on_every_rank(value: torch.Tensor, P: Partition) -> None:
    bits = P.allgather_data([int(value.detach().view(torch.int64))])
    assert all(row == bits[0] for row in bits), f"the value differs: {bits}"


def check(
    P_x: CartesianPartition,
    sequential: Loss,
    loss: Loss,
    x: torch.Tensor,
    target: torch.Tensor,
    sizes: Cut | None = None,
    P_loss: Partition | None = None,
) -> None:
    P_loss = P_loss or P_x.world
    whole = x.detach().clone().requires_grad_()
    block = own_block(x, P_x, sizes)
    expected = sequential(whole, target)
    value = loss(block, own_target(target, x.shape, P_x, sizes))
    assert_same_on_every_rank(value, P_loss)
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12, equal_nan=True)
    where = own_slices(x.shape, P_x, sizes)
    (gradient_whole,) = torch.autograd.grad(expected, whole, create_graph=True)
    (gradient,) = torch.autograd.grad(value, block, create_graph=True)
    assert gradient.shape == block.shape
    assert gradient.requires_grad
    if expected.isnan():
        return
    assert_block_of(gradient.detach(), gradient_whole.detach(), where, "gradient", 1e-12)
    direction = random_like_all(x.shape, 5)
    gradient_whole.backward(direction)
    gradient.backward(torch.zeros_like(gradient) if where is None else direction[where])
    assert whole.grad is not None
    assert_block_of(block.grad, whole.grad, where, "second derivative", 1e-12)


def check_classes(
    P_x: CartesianPartition,
    x_shape: Sequence[int],
    ignored: Sequence[int] = (),
    sizes: Cut | None = None,
    P_loss: Partition | None = None,
    **options: Any,
) -> None:
    x, target = 3 * random_like_all(x_shape, 1), classes_of(x_shape, ignored)
    loss = DistributedCrossEntropyLoss(P_x, P_loss=P_loss, **options)
    check(P_x, torch.nn.CrossEntropyLoss(**options), loss, x, target, sizes, P_loss)


GRIDS: dict[str, tuple[Sequence[int], Sequence[int] | None, Sequence[int]]] = {
    "one": ((1, 1), [2], (4, 3)),
    "batch": ((3, 1), None, (4, 3)),
    "batch, empty": ((4, 1), [4, 0, 2, 3], (2, 3)),
    "classes": ((1, 2), [3, 1], (4, 6)),
    "classes, uneven": ((1, 3), None, (4, 5)),
    "classes, empty": ((1, 5), [5, 4, 3, 2, 1], (4, 3)),
    "both": ((2, 2), [5, 3, 1, 0], (5, 5)),
    "features": ((1, 1, 2, 2), None, (2, 3, 5, 4)),
    "all": ((2, 1, 2, 1), [5, 0, 1, 3], (3, 4, 3, 2)),
    "classes and features": ((1, 2, 2, 1), [5, 0, 1, 3], (3, 5, 3, 2)),
}


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("case", GRIDS)
@distributed(ranks=6, transports=["loopback"])
def test_cross_entropy(P_world: Partition, case: str, reduction: str) -> None:
    shape, ranks, x_shape = GRIDS[case]
    P_x = grid(P_world, shape, ranks)
    samples = x_shape[0] * torch.Size(x_shape[2:]).numel()
    weight = torch.linspace(0.5, 2, x_shape[1], dtype=F64)
    check_classes(P_x, x_shape, reduction=reduction)
    check_classes(P_x, x_shape, ignored=[0, samples - 1], reduction=reduction)
    check_classes(P_x, x_shape, weight=weight, reduction=reduction)
    check_classes(P_x, x_shape, ignored=[1], weight=weight, reduction=reduction)
    check_classes(P_x, x_shape, weight=weight, ignore_index=1, reduction=reduction)


@pytest.mark.parametrize("case", ["both", "classes, empty"])
@distributed(ranks=6)
def test_cross_entropy_on_every_transport(P_world: Partition, case: str) -> None:
    shape, ranks, x_shape = GRIDS[case]
    check_classes(grid(P_world, shape, ranks), x_shape, ignored=[1])


@pytest.mark.parametrize("shape", [(3, 1), (1, 3), (2, 2)])
@distributed(ranks=5, transports=["loopback"])
def test_ignored_targets(P_world: Partition, shape: tuple[int, int]) -> None:
    """All samples of one block, then all samples: torch's mean of none is not a number."""
    P_x = grid(P_world, shape)
    for ignored in ([0, 1, 2], range(6)):
        for reduction in ("mean", "sum"):
            check_classes(P_x, (6, 4), ignored=list(ignored), reduction=reduction)


@distributed(ranks=4, transports=["loopback"])
def test_uneven_blocks(P_world: Partition) -> None:
    check_classes(grid(P_world, [2, 2]), (5, 7), sizes={0: [4, 1], 1: [1, 6]})
    check_classes(grid(P_world, [2, 2]), (5, 7), sizes={0: [0, 5], 1: [7, 0]})


@pytest.mark.parametrize("case", GRIDS)
@distributed(ranks=6, transports=["loopback"])
def test_cross_entropy_without_reduction(P_world: Partition, case: str) -> None:
    """Each sample's loss is on one worker, the first along the classes."""
    shape, ranks, x_shape = GRIDS[case]
    P_x = grid(P_world, shape, ranks)
    target = classes_of(x_shape, [1])
    whole = random_like_all(x_shape, 1).requires_grad_()
    block = own_block(whole, P_x)
    losses = torch.nn.CrossEntropyLoss(reduction="none")(whole, target)
    mine = DistributedCrossEntropyLoss(P_x, reduction="none")(
        block, own_target(target, x_shape, P_x, None)
    )
    where = own_slices(x_shape, P_x)
    counts = P_x.index is not None and P_x.index[1] == 0
    where_losses = (where[0], *where[2:]) if where and counts else None
    assert_block_of(mine.detach(), losses.detach(), where_losses, "losses", 1e-12)
    losses.pow(2).sum().backward()
    mine.pow(2).sum().backward()
    assert whole.grad is not None
    assert_block_of(block.grad, whole.grad, where, "gradient", 1e-12)


@pytest.mark.parametrize("shape, sizes", [((3, 1), {0: [1, 0, 2]}), ((1, 3), None), ((2, 2), None)])
@distributed(ranks=5)
def test_the_batch_may_change(
    P_world: Partition, shape: tuple[int, int], sizes: Cut | None
) -> None:
    """A smaller last batch, split or not, needs no agreement: samples are independent."""
    P_x = grid(P_world, shape)
    loss = DistributedCrossEntropyLoss(P_x)
    for batch in (7, 4, 1, 7):
        x, target = random_like_all((batch, 5), batch), classes_of((batch, 5))
        check(P_x, torch.nn.CrossEntropyLoss(), loss, x, target)
    x, target = random_like_all((3, 5), 1), classes_of((3, 5))
    check(P_x, torch.nn.CrossEntropyLoss(), loss, x, target, sizes)


@distributed(ranks=4, transports=["loopback"])
def test_large_logits_stay_finite(P_world: Partition) -> None:
    P_x = grid(P_world, [1, 4])
    x = 1e4 * random_like_all((3, 6), 1)
    loss = DistributedCrossEntropyLoss(P_x)
    check(P_x, torch.nn.CrossEntropyLoss(), loss, x, classes_of((3, 6)))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("shape", [(1, 1), (2, 2), (1, 3), (5, 1)])
@pytest.mark.parametrize("kind", ELEMENT)
@distributed(ranks=6, transports=["loopback"])
def test_element_losses(
    P_world: Partition, kind: str, shape: tuple[int, int], reduction: str
) -> None:
    sequential, make = ELEMENT[kind]
    P_x = grid(P_world, shape, range(6)[-torch.Size(shape).numel() :])
    x, target = random_like_all((4, 5), 1), random_like_all((4, 5), 2)
    target[0, 0] = x[0, 0]
    check(P_x, sequential(reduction=reduction), make(P_x, reduction), x, target)
    sizes = {0: [4, *[0] * (shape[0] - 1)]}
    check(P_x, sequential(reduction=reduction), make(P_x, reduction), x, target, sizes)


@pytest.mark.parametrize("kind", ELEMENT)
@distributed(ranks=4)
def test_element_losses_on_every_transport(P_world: Partition, kind: str) -> None:
    sequential, make = ELEMENT[kind]
    P_x = grid(P_world, [1, 3], [3, 2, 0])
    x, target = random_like_all((4, 5), 1), random_like_all((4, 5), 2)
    check(P_x, sequential(), make(P_x), x, target)


@pytest.mark.parametrize("kind", ELEMENT)
@distributed(ranks=3, transports=["loopback"])
def test_element_losses_without_reduction(P_world: Partition, kind: str) -> None:
    sequential, make = ELEMENT[kind]
    P_x = grid(P_world, [2, 1], [2, 0])
    x, target = random_like_all((3, 2), 1), random_like_all((3, 2), 2)
    losses = make(P_x, "none")(own_block(x, P_x), own_target(target, x.shape, P_x, None))
    expected = sequential(reduction="none")(x, target)
    assert_block_of(losses.detach(), expected, own_slices(x.shape, P_x), "losses", 1e-12)


@distributed(ranks=5, transports=["loopback"])
def test_some_workers_only(P_world: Partition) -> None:
    P_x, P_loss = grid(P_world, [1, 2], [3, 1]), P_world.create_partition_inclusive([1, 3, 4])
    if P_loss.active:
        check_classes(P_x, (4, 3), P_loss=P_loss)
        x, target = random_like_all((4, 5), 1), random_like_all((4, 5), 2)
        loss = DistributedMSELoss(P_x, P_loss=P_loss)
        check(P_x, torch.nn.MSELoss(), loss, x, target, P_loss=P_loss)


@distributed(ranks=3, transports=["loopback"])
def test_what_does_not_fit_is_refused(P_world: Partition) -> None:
    P_x, P_loss = grid(P_world, [2, 1]), P_world.create_partition_inclusive([1, 2])
    with pytest.raises(PartitionError, match=r"world ranks \[0\] of P_x are not in P_loss"):
        DistributedMSELoss(P_x, P_loss=P_loss)
    with pytest.raises(ShapeError, match="reduction is 'average'"):
        DistributedMSELoss(P_x, "average")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ShapeError, match="label_smoothing is not supported"):
        DistributedCrossEntropyLoss(P_x, label_smoothing=0.1)
    with pytest.raises(PartitionError, match="needs an axis for the batch and one for the classes"):
        DistributedCrossEntropyLoss(grid(P_world, [2]))
    if P_x.active:
        with pytest.raises(ShapeError, match=r"block has shape \[3, 1\], not \[3, 2\]"):
            DistributedMSELoss(P_x)(torch.randn(3, 2), torch.randn(3, 1))
        with pytest.raises(ShapeError, match=r"block has shape \[2\], not \[3\]"):
            DistributedCrossEntropyLoss(P_x)(torch.randn(3, 2), torch.zeros(2, dtype=torch.int64))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@distributed(ranks=3, transports=["loopback"])
def test_half_precision_counts_every_cell(P_world: Partition, dtype: torch.dtype) -> None:
    """There are more cells than the dtype can count; the mean is right all the same."""
    P_x = grid(P_world, [2, 1])
    whole = random_like_all((300, 300), 1).to(dtype)
    expected = torch.nn.MSELoss()(whole, torch.zeros_like(whole))
    block = own_block(whole, P_x)
    value = DistributedMSELoss(P_x)(block, torch.zeros_like(block))
    assert value.dtype == dtype
    torch.testing.assert_close(value, expected)
    value.backward()
    assert block.grad is not None and block.grad.dtype == dtype
    logits, target = whole[:, :7], classes_of((300, 7))
    for shape in ([3, 1], [1, 3]):
        P_x = grid(P_world, shape)
        block = own_block(logits, P_x)
        loss = DistributedCrossEntropyLoss(P_x)
        value = loss(block, own_target(target, logits.shape, P_x, None))
        reference = torch.nn.CrossEntropyLoss()(logits, target)
        torch.testing.assert_close(value, reference, rtol=2e-2, atol=2e-2)


@distributed(ranks=2)
def test_a_target_outside_the_classes_is_refused_everywhere(P_world: Partition) -> None:
    P_x = P_world.create_cartesian_topology_partition([2, 1])
    criterion = DistributedCrossEntropyLoss(P_x)
    target = torch.tensor([7 if P_x.rank == 1 else 2])
    with pytest.raises(ShapeError, match="target 7 is none of the classes 0 to 3"):
        criterion(torch.randn(1, 4), target)
        criterion(torch.randn(1, 4), target)
