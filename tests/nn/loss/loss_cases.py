"""A distributed loss against torch's: value, gradients and second derivatives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from gpudist.world.partition import CartesianPartition, Partition
from tests.nn.compare import Cut, Slices, assert_block_of, own_slices, random_like_all

Loss = Callable[..., torch.Tensor]
Kind = Literal["any", "probability", "logarithm", "count", "sign", "variance"]


def sequential_of(layer: str, **options: Any) -> Loss:
    """Torch's loss. Its mean of a divergence warns: that mean is taken here."""
    make = getattr(torch.nn, layer)
    if layer == "KLDivLoss" and options.get("reduction", "mean") == "mean":
        loss = make(**{**options, "reduction": "none"})
        return lambda *tensors: loss(*tensors).mean()
    return make(**options)


def values(kind: Kind, shape: Sequence[int], seed: int) -> torch.Tensor:
    x = 2 * random_like_all(shape, seed)
    if kind == "probability":
        return x.sigmoid()
    if kind == "logarithm":
        return x.sigmoid().log()
    if kind == "count":
        return x.exp().floor()
    if kind == "sign":
        return x.sign()
    return x.square() if kind == "variance" else x


def own_part(
    whole: torch.Tensor, shape: Sequence[int], P_x: Partition, sizes: Cut | None = None
) -> torch.Tensor:
    """This rank's block of a tensor of the input's shape, or of one number for each sample."""
    where = where_of(whole, shape, P_x, sizes)
    return (whole.reshape(-1)[:0] if where is None else whole[where]).detach().clone()


def where_of(
    whole: torch.Tensor, shape: Sequence[int], P_x: Partition, sizes: Cut | None = None
) -> Slices | None:
    where = own_slices(shape, P_x, sizes)
    if where is None or whole.dim() == len(shape):
        return where
    return (where[0], *where[2:])


def assert_same_on_every_rank(value: torch.Tensor, P: Partition) -> None:
    bits = P.allgather_data([int(value.detach().double().view(torch.int64))])
    assert all(row == bits[0] for row in bits), f"the value differs: {bits}"


def check(
    P_x: CartesianPartition,
    sequential: Loss,
    loss: Loss,
    wholes: Sequence[torch.Tensor],
    sizes: Cut | None = None,
    P_loss: Partition | None = None,
    learned: int = 1,
    tolerance: float = 1e-12,
    twice: bool = True,
) -> None:
    """Compare the losses of these tensors. Called on every rank of ``P_loss``.

    Args:
        P_x, sizes: how they are cut; the first is the input.
        sequential, loss: torch's loss, and the distributed one.
        learned: how many of the tensors, from the first on, have gradients.
        tolerance: of values, absolute and relative; of derivatives 10 and 100 times that.
        twice: compare second derivatives too.
    """
    shape = wholes[0].shape
    leaves = [whole.detach().clone() for whole in wholes]
    blocks = [own_part(whole, shape, P_x, sizes) for whole in wholes]
    for each in (*leaves[:learned], *blocks[:learned]):
        each.requires_grad_()
    expected = sequential(*leaves)
    value = loss(*blocks)
    # The loss itself may be linear in its input.
    if expected.dim():
        assert_losses(value, expected, shape, P_x, sizes, tolerance)
        numbers = random_like_all(expected.shape, 6)
        own = own_losses(numbers, shape, P_x, sizes).to(value.dtype)
        value, expected = (
            (value.square() * own).sum(),
            (expected.square() * numbers.to(expected.dtype)).sum(),
        )
    else:
        assert_same_on_every_rank(value, P_loss or P_x.world)
        assert_close(value, expected, tolerance)
        value, expected = value.square(), expected.square()
    check_gradients(
        P_x, value, expected, blocks[:learned], leaves[:learned], sizes, tolerance, twice
    )


def own_losses(
    whole: torch.Tensor, shape: Sequence[int], P_x: Partition, sizes: Cut | None
) -> torch.Tensor:
    """Return this rank's part of a tensor with one number per loss."""
    part = own_part(whole, shape, P_x, sizes)
    counts_twice = whole.dim() < len(shape) and P_x.index is not None and P_x.index[1] > 0
    return part.reshape(-1)[:0] if counts_twice else part


def assert_losses(
    value: torch.Tensor,
    expected: torch.Tensor,
    shape: Sequence[int],
    P_x: Partition,
    sizes: Cut | None,
    tolerance: float,
) -> None:
    own = own_losses(expected, shape, P_x, sizes)
    if own.numel() == 0:
        assert value.numel() == 0
    else:
        assert_close(value.detach(), own, tolerance)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def check_gradients(
    P_x: CartesianPartition,
    value: torch.Tensor,
    expected: torch.Tensor,
    blocks: Sequence[torch.Tensor],
    leaves: Sequence[torch.Tensor],
    sizes: Cut | None,
    tolerance: float,
    twice: bool,
) -> None:
    """First derivatives, and the second ones along a direction."""
    shape = leaves[0].shape
    wheres = [where_of(leaf, shape, P_x, sizes) for leaf in leaves]
    firsts_whole = torch.autograd.grad(expected, leaves, create_graph=True)
    firsts = torch.autograd.grad(value, blocks, create_graph=True)
    for first, block in zip(firsts, blocks, strict=True):
        assert first.shape == block.shape and first.requires_grad
    if expected.isnan():
        return
    for first, whole, where in zip(firsts, firsts_whole, wheres, strict=True):
        assert_block_of(first.detach(), whole.detach(), where, "gradient", 10 * tolerance)
    if not twice:
        return
    directions = [random_like_all(leaf.shape, 5 + i) for i, leaf in enumerate(leaves)]
    own = [own_part(direction, shape, P_x, sizes) for direction in directions]
    torch.autograd.backward(firsts_whole, directions)
    torch.autograd.backward(firsts, [d.reshape(f.shape) for d, f in zip(own, firsts, strict=True)])
    for block, leaf, where in zip(blocks, leaves, wheres, strict=True):
        assert leaf.grad is not None
        assert_block_of(block.grad, leaf.grad, where, "second derivative", 100 * tolerance)
