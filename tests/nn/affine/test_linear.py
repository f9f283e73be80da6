"""The distributed linear layer is the sequential one, however its blocks are distributed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from gpudist.errors import PartitionError, ShapeError
from gpudist.nn import DistributedLinear
from gpudist.world.partition import CartesianPartition, Partition
from tests.nn.compare import (
    Cut,
    Slices,
    assert_block_of,
    assert_same_as_sequential,
    build_both,
    gradient_of,
    grid,
    own_block,
    own_slices,
    random_like_all,
)
from tests.pool import distributed

Placed = tuple[Sequence[int], Sequence[int] | None]
F64 = torch.float64


def owner(P_w: CartesianPartition) -> Any:
    """Weight blocks on the first workers along leading axes, the bias on their first column."""
    *_, rows, columns = P_w.shape
    first = P_w.create_partition_inclusive(range(rows * columns))
    P_first = first.create_cartesian_topology_partition([rows, columns])

    def owned(name: str, shape: torch.Size) -> Slices | None:
        if P_first.index is None or (name == "bias" and P_first.index[1] > 0):
            return None
        where = own_slices((shape[0], columns), P_first)
        return own_slices(shape, P_first) if name == "weight" else (where or ())[:1]

    return owned


def check_split(
    P_world: Partition, placed: tuple[Placed, Placed, Placed], batch: int, sizes: Cut | None = None
) -> None:
    P_x, P_y, P_w = (grid(P_world, shape, ranks) for shape, ranks in placed)
    assert_same_as_sequential(
        lambda: torch.nn.Linear(7, 5, dtype=F64),
        lambda: DistributedLinear(P_x, P_y, P_w, 7, 5, dtype=F64),
        P_x,
        P_y,
        (batch, 7),
        owner(P_w),
        sizes=sizes,
        output_sizes=sizes,
    )


SPLIT = {
    "inputs": (([1, 3], None), ([1, 1], None), ([1, 3], None)),
    "both": (([1, 2], None), ([1, 2], None), ([2, 2], None)),
    "both, uneven": (([1, 2], [1, 2]), ([1, 3], [0, 4, 5]), ([3, 2], [5, 4, 3, 2, 1, 0])),
    "disjoint": (([1, 2], [6, 7]), ([1, 2], [0, 1]), ([2, 2], [2, 3, 4, 5])),
    "output apart": (([1, 2], [0, 1]), ([1, 2], [5, 4]), ([2, 2], [3, 2, 1, 0])),
}


@distributed(ranks=6)
def test_split_features_on_every_transport(P_world: Partition) -> None:
    check_split(P_world, SPLIT["both, uneven"], 3)


LEADING_SPLIT: dict[str, tuple[Placed, Placed, Placed]] = {
    "batch and inputs": (([2, 2], None), ([2, 1], None), ([2, 1, 2], None)),
    "batch and outputs": (([2, 1], [6, 5]), ([2, 2], None), ([2, 2, 1], [3, 2, 1, 0])),
    "batch and both": (([2, 2], None), ([2, 2], None), ([2, 2, 2], [1, 3, 5, 7, 6, 4, 2, 0])),
}


@pytest.mark.parametrize("case", ["batch and inputs", "batch and outputs"])
@distributed(ranks=8)
def test_uneven_and_empty_blocks_of_leading_dims(P_world: Partition, case: str) -> None:
    for sizes in ([3, 1], [0, 4]):
        check_split(P_world, LEADING_SPLIT[case], 4, sizes={0: sizes})


@distributed(ranks=3, transports=["loopback"])
def test_an_axis_of_features_alone(P_world: Partition) -> None:
    P_x = grid(P_world, [1], [2])
    assert_same_as_sequential(
        lambda: torch.nn.Linear(4, 3, dtype=F64),
        lambda: DistributedLinear(P_x, 4, 3, dtype=F64),
        P_x,
        P_x,
        (5, 4),
        lambda name, shape: tuple(slice(0, n) for n in shape) if P_x.rank == 0 else None,
    )


@distributed(ranks=4, transports=["loopback"])
def test_blocks_that_do_not_fit_are_refused_on_every_rank(P_world: Partition) -> None:
    P_x, P_w = grid(P_world, [1, 2], [0, 3]), grid(P_world, [2, 2])
    layer = DistributedLinear(P_x, P_x, P_w, 6, 4, dtype=F64)
    with pytest.raises(ShapeError, match=r"\[4, 2\] features.* 6 in balanced blocks"):
        layer(own_block(random_like_all((2, 6), 0), P_x, {1: [4, 2]}))
    layer = DistributedLinear(P_x, P_x, P_w, 6, 4, dtype=F64)
    with pytest.raises(ShapeError, match=r"\[4, 3\] features"):
        layer(own_block(random_like_all((2, 7), 0), P_x))
    layer = DistributedLinear(P_x, P_x, P_w, 6, 4, dtype=F64)
    with pytest.raises(ShapeError, match=r"input has 1 dims but P_x of shape \[1, 2\] has 2 axes"):
        layer(torch.zeros(3 if P_x.active else 0, dtype=F64))


@distributed(ranks=2, transports=["loopback"])
def test_wrong_number_of_features_is_refused(P_world: Partition) -> None:
    layer = DistributedLinear(grid(P_world, [2, 1]), 6, 4)
    with pytest.raises(ShapeError, match="has 5 features, not 6"):
        layer(torch.randn(3, 5))


@distributed(ranks=4, transports=["loopback"])
def test_partitions_that_do_not_fit_are_refused(P_world: Partition) -> None:
    P_1, P_2, P_4 = (grid(P_world, shape) for shape in ([1, 1], [1, 2], [2, 2]))
    with pytest.raises(PartitionError, match=r"splits the features; give P_y and P_w"):
        DistributedLinear(P_2, 6, 4)
    with pytest.raises(PartitionError, match=r"P_w has shape \[2, 2\] but must be \[1, 2\]"):
        DistributedLinear(P_2, P_1, P_4, 6, 4)
    with pytest.raises(PartitionError, match=r"P_y has shape \[1, 2\] but must be \[2, 'any'\]"):
        DistributedLinear(P_4, P_2, P_4, 6, 4)
    with pytest.raises(PartitionError, match=r"P_w has shape \[2, 2\] but must be \[2, 2, 2\]"):
        DistributedLinear(P_4, P_4, P_4, 6, 4)
    with pytest.raises(PartitionError, match=r"P_y has shape \[2, 2\]"):
        DistributedLinear(P_2, P_4, P_4, 6, 4)
    with pytest.raises(PartitionError, match="got 2 partitions"):
        DistributedLinear(P_2, P_2, 6, 4)  # pyright: ignore
    with pytest.raises(PartitionError, match="give both or neither"):
        DistributedLinear(P_2, 6, 4, P_y=P_2)
    with pytest.raises(ShapeError, match="2 blocks but only 1 input features"):
        DistributedLinear(P_2, P_2, P_4, 1, 4)
    with pytest.raises(ShapeError, match="2 blocks but only 1 output features"):
        DistributedLinear(P_2, P_2, P_4, 4, 1)


@pytest.mark.parametrize("of", ["input", "parameters"])
@pytest.mark.parametrize("case", ["inputs", "both", "disjoint", "output apart", "batch and both"])
@distributed(ranks=8, transports=["loopback"])
def test_double_backward_of_what_is_linear_in_the_output(
    P_world: Partition, case: str, of: str
) -> None:
    """A gradient penalty: ranks without cells of the output must take part in its messages."""
    P_x, P_y, P_w = (
        grid(P_world, shape, ranks) for shape, ranks in {**SPLIT, **LEADING_SPLIT}[case]
    )
    sequential, layer = build_both(
        lambda: torch.nn.Linear(5, 4, dtype=F64),
        lambda: DistributedLinear(P_x, P_y, P_w, 5, 4, dtype=F64),
        owner(P_w),
    )
    whole = random_like_all((2, 5), 1).requires_grad_()
    block = own_block(whole, P_x)
    for model, x in ((sequential, whole), (layer, block)):
        leaves = [x] if of == "input" else list(model.parameters())
        gradients = torch.autograd.grad(
            model(x).sum(), leaves, create_graph=True, allow_unused=True
        )
        penalty = sum(g.pow(3).sum() for g in gradients if g is not None)
        if isinstance(penalty, torch.Tensor) and penalty.requires_grad:
            penalty.backward()
    assert isinstance(layer.weight, torch.Tensor) and isinstance(sequential.weight, torch.Tensor)
    if of == "parameters":
        actual, expected, where = block.grad, gradient_of(whole), own_slices(whole.shape, P_x)
    else:
        actual, expected = layer.weight.grad, gradient_of(sequential.weight)
        where = owner(P_w)("weight", expected.shape)
    if where is not None or actual is not None:
        assert_block_of(actual, expected, where, f"gradient of the penalty by {of}")
