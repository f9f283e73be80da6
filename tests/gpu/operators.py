"""Bodies that carry out operators on the device of their world, whichever it is.

Data is whole numbers small enough for exact sums: the order of additions does not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from gpudist import SlidingWindow, nn
from gpudist.testing import assert_adjoint
from gpudist.world.partition import CartesianPartition, Partition
from tests.ops.dense import local_input, partition_of

Operator = Callable[[torch.Tensor], torch.Tensor]


class Given(NamedTuple):
    """An operator, and this rank's input on the CPU."""

    operator: Operator
    x: torch.Tensor


def integers(
    shape: Sequence[int], seed: int = 0, dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    """Return whole numbers from -4 to 4, equal on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, tuple(shape), generator=generator).to(dtype)


def grid_of(size: int) -> tuple[int, int]:
    """Return the squarest grid with at least as many columns as rows."""
    rows = next(n for n in range(int(size**0.5), 0, -1) if size % n == 0)
    return rows, size // rows


def on_grid(P_world: Partition, leading: Sequence[int] = ()) -> CartesianPartition:
    """Every worker, on a plane behind these axes."""
    return P_world.create_cartesian_topology_partition([*leading, *grid_of(P_world.size)])


def own(P: Partition, shape: Sequence[int], batch: int) -> torch.Tensor:
    """Return this worker's own tensor, or a placeholder."""
    return integers(shape, P.rank or 0) if P.active else torch.empty(batch, 0).double()


def halo(P_world: Partition, nested: bool = False, periodic: bool = False) -> Given:
    P_x = on_grid(P_world)
    layer = nn.HaloExchange(P_x, halo=((1, 2), (2, 1)), periodic=periodic, nested=nested)
    return Given(layer, local_input(integers((5, 7)), P_x))


def halo_of_three_dims(P_world: Partition) -> Given:
    P_x = on_grid(P_world, [1])
    layer = nn.HaloExchange(P_x, halo=((1, 1),) * 3, periodic=(True, False, True))
    return Given(layer, local_input(integers((3, 5, 4)), P_x))


def halo_wider_than_all(P_world: Partition) -> Given:
    P_x = P_world.create_cartesian_topology_partition([P_world.size])
    layer = nn.HaloExchange(P_x, halo=((6, 9),), periodic=True)
    return Given(layer, local_input(integers((5,)), P_x))


def halo_of_a_window(P_world: Partition) -> Given:
    P_x = P_world.create_cartesian_topology_partition([1, 1, P_world.size])
    layer = nn.HaloExchange(P_x, [SlidingWindow(3, 2, 3, (4, 1))])
    return Given(layer, local_input(integers((2, 1, 17)), P_x))


def rows_to_columns(P_world: Partition) -> Given:
    P_x = P_world.create_cartesian_topology_partition([P_world.size, 1])
    P_y = P_world.create_cartesian_topology_partition([1, P_world.size])
    return Given(nn.Repartition(P_x, P_y), local_input(integers((5, 7)), P_x))


def to_fewer(P_world: Partition) -> Given:
    P_x = on_grid(P_world)
    fewer = range(P_world.size)[::-1][: max(1, P_world.size // 2)]
    P_y = partition_of(P_world, fewer, [1, len(fewer)])
    return Given(nn.Repartition(P_x, P_y), local_input(integers((5, 7)), P_x))


def last_to_all(P_world: Partition) -> Given:
    root = partition_of(P_world, [P_world.size - 1], [1, 1])
    return Given(nn.Broadcast(root, on_grid(P_world)), own(root, (3, 4), 3))


def column_to_rows(P_world: Partition) -> Given:
    rows, _ = grid_of(P_world.size)
    column = partition_of(P_world, range(rows), [rows, 1])
    return Given(nn.Broadcast(column, on_grid(P_world)), own(column, (3, 4), 3))


def all_to_last(P_world: Partition) -> Given:
    root = partition_of(P_world, [P_world.size - 1], [1, 1])
    return Given(nn.SumReduce(on_grid(P_world), root), own(P_world, (3, 4), 3))


def rows_to_column(P_world: Partition) -> Given:
    rows, _ = grid_of(P_world.size)
    column = partition_of(P_world, range(rows), [rows, 1])
    return Given(nn.SumReduce(on_grid(P_world), column), own(P_world, (3, 4), 3))


def sum_over(P_world: Partition, axes: tuple[int, ...]) -> Given:
    return Given(nn.AllSumReduce(on_grid(P_world), axes), own(P_world, (3, 4), 3))


def all_gather(P_world: Partition, axes: tuple[int, ...]) -> Given:
    P_x = on_grid(P_world)
    return Given(nn.AllGather(P_x, axes), local_input(integers((5, 7)), P_x))


def sum_scatter(P_world: Partition) -> Given:
    return Given(nn.SumScatter(on_grid(P_world), (0, 1)), own(P_world, (5, 7), 5))


def scatter(P_world: Partition) -> Given:
    root = partition_of(P_world, [P_world.size - 1], [1, 1])
    layer = nn.Scatter(on_grid(P_world), P_world.size - 1)
    return Given(layer, own(root, (5, 7), 5))


def gather(P_world: Partition) -> Given:
    P_x = on_grid(P_world)
    return Given(nn.Gather(P_x, P_world.size - 1), local_input(integers((5, 7)), P_x))


def first_to_last(P_world: Partition) -> Given:
    P_x, P_y = (partition_of(P_world, [rank], [1, 1]) for rank in (0, P_world.size - 1))
    return Given(nn.SendRecv(P_x, P_y), own(P_x, (3, 4), 3))


def without_cells(P_world: Partition, extents: tuple[int, int]) -> Given:
    P_x = P_world.create_cartesian_topology_partition([P_world.size, 1])
    P_y = P_world.create_cartesian_topology_partition([1, P_world.size])
    return Given(nn.Repartition(P_x, P_y), local_input(integers(extents), P_x))


OPERATORS: dict[str, Callable[[Partition], Given]] = {
    "halo": halo,
    "halo, nested": partial(halo, nested=True),
    "halo, periodic": partial(halo, periodic=True),
    "halo, periodic, nested": partial(halo, periodic=True, nested=True),
    "halo of three dims": halo_of_three_dims,
    "halo wider than all": halo_wider_than_all,
    "halo of a window": halo_of_a_window,
    "repartition of rows to columns": rows_to_columns,
    "repartition to fewer": to_fewer,
    "repartition of an empty batch": partial(without_cells, extents=(0, 7)),
    "repartition of one cell": partial(without_cells, extents=(1, 1)),
    "broadcast from the last": last_to_all,
    "broadcast along rows": column_to_rows,
    "sum-reduce to the last": all_to_last,
    "sum-reduce along rows": rows_to_column,
    "all-sum-reduce along rows": partial(sum_over, axes=(1,)),
    "all-sum-reduce": partial(sum_over, axes=(0, 1)),
    "all-gather along rows": partial(all_gather, axes=(1,)),
    "all-gather": partial(all_gather, axes=(0, 1)),
    "sum-scatter": sum_scatter,
    "scatter": scatter,
    "gather": gather,
    "send-receive": first_to_last,
}


def on_cpu(**tensors: torch.Tensor) -> dict[str, torch.Tensor]:
    return {name: x.detach().cpu() for name, x in tensors.items()}


def carried_out(P_world: Partition, case: str) -> dict[str, torch.Tensor]:
    """Output, gradient, and the forward again as the gradient of that; the dot test holds."""
    operator, x = OPERATORS[case](P_world)
    rank = P_world.rank or 0
    before = x
    x = x.to(P_world.device).requires_grad_()
    y = operator(x)
    assert y.device == P_world.device
    cotangent = integers(y.shape, 100 + rank).to(y.device).requires_grad_()
    (gradient,) = torch.autograd.grad(y, x, cotangent, create_graph=True)
    tangent = integers(x.shape, 200 + rank).to(x.device)
    (forward_again,) = torch.autograd.grad(gradient, cotangent, tangent)
    assert torch.equal(x.detach().cpu(), before), "the input was modified"
    assert_adjoint(operator, x, P_world)
    return on_cpu(y=y, gradient=gradient, forward_again=forward_again)


def whole_of(x: Any) -> torch.Tensor:
    """Return the whole tensor, global or not."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x
