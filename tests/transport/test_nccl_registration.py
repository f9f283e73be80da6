"""Memory that NCCL registers, and the order of its kernels, over the doubles of CUDA and NCCL."""

from __future__ import annotations

import os
from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch

from gpudist import ops
from gpudist.ops.operator import cached_operator
from gpudist.transport.base import Transport
from gpudist.transport.nccl import library
from gpudist.transport.nccl.transport import NcclTransport
from gpudist.world import runtime
from gpudist.world.partition import Partition
from tests.doubles.graphs import Graph
from tests.doubles.nccl import clear, configure, violations
from tests.transport.nccl_actions import ACTIONS
from tests.transport.worlds import collect, results

RANKS = 4
CELLS = 8
Tensors = tuple[torch.Tensor, ...]
VARIABLES = ("NCCL_LOCAL_REGISTER", "NCCL_GRAPH_REGISTER")


def block(P_x: Partition) -> torch.Tensor:
    """A block of a square matrix of different cells."""
    cells = torch.arange(float(CELLS * CELLS)).reshape(CELLS, CELLS)
    assert P_x.index is not None
    for axis, size in enumerate(P_x.shape):
        cells = cells.tensor_split(size, axis)[P_x.index[axis]]
    return cells.contiguous()


def with_gradient(operator: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> Tensors:
    y = operator(x)
    (gradient,) = torch.autograd.grad(y, x, torch.ones_like(y))
    return y.detach(), gradient


def repartitioned(P_world: Partition, first: list[int], second: list[int]) -> Tensors:
    """Rows are sent and received in place, columns are not."""
    P_x = P_world.create_cartesian_topology_partition(first)
    P_y = P_world.create_cartesian_topology_partition(second)
    x = block(P_x).requires_grad_()
    return with_gradient(
        cached_operator(ops.Repartition, P_x, (P_y, True, (CELLS, CELLS), "static")), x
    )


def rows_to_columns(P_world: Partition) -> Tensors:
    return repartitioned(P_world, [RANKS, 1], [1, RANKS])


def columns_to_rows(P_world: Partition) -> Tensors:
    return repartitioned(P_world, [1, RANKS], [RANKS, 1])


def halo_of_rows(P_world: Partition) -> Tensors:
    """Faces are contiguous in the input and in the output; the adjoint adds them."""
    P_x = P_world.create_cartesian_topology_partition([RANKS, 1])
    x = block(P_x).requires_grad_()
    operator = cached_operator(
        ops.HaloExchange, P_x, (None, ((1, 1), (0, 0)), False, 0.0, False, (CELLS, CELLS), "static")
    )
    return with_gradient(operator, x)


def halo_of_boxes(P_world: Partition) -> Tensors:
    """Some faces are contiguous in the input, and none in the output."""
    P_x = P_world.create_cartesian_topology_partition([2, 2, 1])
    x = torch.arange(64.0).reshape(4, 4, 4).requires_grad_()
    operator = cached_operator(
        ops.HaloExchange,
        P_x,
        (None, ((1, 1), (1, 1), (0, 0)), False, 0.0, False, (8, 8, 4), "static"),
    )
    return with_gradient(operator, x)


def action_of(name: str) -> Callable[[Partition], Tensors]:
    return lambda P_world: (ACTIONS[name](P_world),)


MOVEMENTS: dict[str, Callable[[Partition], Tensors]] = {
    movement.__name__: movement
    for movement in (rows_to_columns, columns_to_rows, halo_of_rows, halo_of_boxes)
} | {name: action_of(name) for name in ("halo", "backward", "broadcast", "all_sum_reduce")}


def in_a_world_that_registers(
    transport: Transport, name: str, is_captured: bool, expandable: bool
) -> list[str]:
    """Return misuses in a world in which NCCL may register any memory."""
    assert not any(variable in os.environ for variable in VARIABLES)
    collect()
    clear()
    P_world, movement = runtime.world_of(transport), MOVEMENTS[name]
    configure("register_limit", 10**9)
    expected = movement(P_world)
    configure("register_limit", 1)
    configure("expandable_segments", int(expandable))
    if is_captured:
        with Graph() as graph:
            found = movement(P_world)
        for y in found:
            y.fill_(-1.0)
        graph.launch()
        graph.destroy()
    else:
        found = movement(P_world)
    transport.wait()
    assert all(map(torch.equal, found, expected))
    return violations()


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", MOVEMENTS)
@pytest.mark.parametrize(
    ("is_captured", "expandable"),
    [(False, False), (True, False), (True, True)],
    ids=["plain", "captured", "captured from expandable segments"],
)
def test_both_sides_of_a_message_are_alike(name: str, is_captured: bool, expandable: bool) -> None:
    found = results("nccl", RANKS, in_a_world_that_registers, name, is_captured, expandable)
    assert found == [[]] * RANKS


def beside_torchs_nccl(transport: Transport) -> str | None:
    """Return the variable that orders kernels after a world has joined beside torch's NCCL."""
    assert isinstance(transport, NcclTransport)
    with (
        patch.object(library.dist, "is_initialized", return_value=True),
        patch.object(library.dist, "get_backend_config", return_value="cuda:nccl"),
        patch.dict(os.environ),
    ):
        runtime.connect(
            "nccl", transport.store, transport.rank, transport.size, 20.0,
            f"{transport.prefix}/ordered",
        ).close()  # fmt: skip
        return os.environ.get("NCCL_LAUNCH_ORDER_IMPLICIT")


def test_kernels_keep_the_hosts_order_beside_torchs() -> None:
    assert results("nccl", 2, beside_torchs_nccl) == ["1", "1"]
