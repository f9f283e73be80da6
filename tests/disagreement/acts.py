"""What ranks do together, with what one of them may mean otherwise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

import gpudist
from gpudist import nn
from gpudist.exchange import carry_out
from gpudist.ops import HaloExchange
from gpudist.world.partition import CartesianPartition, Partition
from tests.ops.dense import block, partition_of


@dataclass(frozen=True)
class Meant:
    """What a rank takes for granted.

    Attributes:
        cells: of the global tensor, along each dim, for each rank.
        dtype: of the tensor.
        reverses: the order of the workers of every partition.
        other: whatever else the operator is given: widths, axes, the root, the kernel.
    """

    cells: int = 4
    dtype: torch.dtype = torch.float32
    reverses: bool = False
    other: bool = False


SAME = Meant()
CHANGES = {
    "shape": replace(SAME, cells=5),
    # As wide: the bytes would fit.
    "dtype": replace(SAME, dtype=torch.int32),
    "partition": replace(SAME, reverses=True),
    "kernel": replace(SAME, other=True),
}
Act = Callable[[Partition, Meant], Any]


def _line(P_world: Partition, meant: Meant, axis: int = 0) -> CartesianPartition:
    ranks = range(P_world.size)
    shape = [1, 1]
    shape[axis] = P_world.size
    return partition_of(P_world, list(ranks)[::-1] if meant.reverses else ranks, shape)


def _single(P_world: Partition, rank: int, meant: Meant) -> CartesianPartition:
    rank = (P_world.size - 1 - rank) if meant.reverses else rank
    return partition_of(P_world, [rank], [1, 1])


def _whole(P_world: Partition, meant: Meant) -> torch.Tensor:
    n = meant.cells * P_world.size
    return torch.arange(n * n).reshape(n, n).to(meant.dtype)


def _part(P: CartesianPartition, x: torch.Tensor) -> torch.Tensor:
    return block(x, P.shape, P.index) if P.index is not None else x.new_empty((x.shape[0], 0))


def _halo(P_world: Partition, meant: Meant, nested: bool = False) -> torch.Tensor:
    P_x, x = _line(P_world, meant), _whole(P_world, meant)
    width = 2 if meant.other else 1
    return gpudist.halo_exchange(
        _part(P_x, x), P_x, halo=[(width, width), (1, 1)], nested=nested, periodic=True,
        global_shape=tuple(x.shape),
    )  # fmt: skip


def _adjoint_of_halo(P_world: Partition, meant: Meant) -> torch.Tensor:
    P_x, x = _line(P_world, meant), _whole(P_world, meant)
    widths = [(2, 2) if meant.other else (1, 1), (0, 0)]
    exchange = HaloExchange(P_x, halo=widths, periodic=True, global_shape=tuple(x.shape))
    movement = exchange.movement(_part(P_x, x))
    return carry_out([movement.T], [torch.ones(movement.output_shape, dtype=meant.dtype)])[0]


def _repartition(P_world: Partition, meant: Meant) -> torch.Tensor:
    P_x, x = _line(P_world, meant), _whole(P_world, meant)
    P_y = _single(P_world, 0, meant) if meant.other else _line(P_world, meant, axis=1)
    return gpudist.repartition(_part(P_x, x), P_x, P_y, global_shape=tuple(x.shape))


def _broadcast(P_world: Partition, meant: Meant) -> torch.Tensor:
    P_x, x = _single(P_world, 2 if meant.other else 0, meant), _whole(P_world, meant)
    P_y = _line(P_world, SAME)
    return gpudist.broadcast(_part(P_x, x), P_x, P_y, global_shape=tuple(x.shape))


def _sum_reduce(P_world: Partition, meant: Meant) -> torch.Tensor:
    P_y, x = _single(P_world, 2 if meant.other else 0, meant), _whole(P_world, meant)
    return gpudist.sum_reduce(x, _line(P_world, SAME), P_y, global_shape=tuple(x.shape))


def _all_sum_reduce(P_world: Partition, meant: Meant) -> torch.Tensor:
    x = _whole(P_world, meant)
    axes = [1] if meant.other else [0, 1]
    return gpudist.all_sum_reduce(x, _line(P_world, meant), axes, global_shape=tuple(x.shape))


def _all_gather(P_world: Partition, meant: Meant) -> torch.Tensor:
    P_x, x = _line(P_world, meant), _whole(P_world, meant)
    axes = [1] if meant.other else [0]
    return gpudist.all_gather(_part(P_x, x), P_x, axes, global_shape=tuple(x.shape))


def _sum_scatter(P_world: Partition, meant: Meant) -> torch.Tensor:
    axes = [1] if meant.other else [0]
    x = _whole(P_world, meant)
    return gpudist.sum_scatter(x, _line(P_world, meant), axes, shape="dynamic")


def _scatter(P_world: Partition, meant: Meant) -> torch.Tensor:
    root = 2 if meant.other else 0
    return gpudist.scatter(_whole(P_world, meant), _line(P_world, meant), root)


def _gather(P_world: Partition, meant: Meant) -> torch.Tensor:
    P_x, x = _line(P_world, meant), _whole(P_world, meant)
    return gpudist.gather(_part(P_x, x), P_x, 2 if meant.other else 0)


def _send(P_world: Partition, meant: Meant) -> torch.Tensor:
    """Round the ring, one on or two."""
    P_x, x = _line(P_world, meant), _whole(P_world, meant)
    step = 2 if meant.other else 1
    ranks = [(rank + step) % P_world.size for rank in P_x.ranks]
    P_y = partition_of(P_world, ranks, P_x.shape)
    return gpudist.send_recv(_part(P_x, x), P_x, P_y, global_shape=tuple(x.shape))


def _convolution(P_world: Partition, meant: Meant) -> None:
    """A layer, forward and backward."""
    ranks = range(P_world.size)
    P_x = partition_of(
        P_world, list(ranks)[::-1] if meant.reverses else ranks, [1, 1, P_world.size]
    )
    dtype = torch.float64 if meant.dtype == torch.int32 else torch.float32
    kernel = 5 if meant.other else 3
    layer = nn.DistributedConv1d(P_x, 2, 2, kernel, padding=kernel // 2, dtype=dtype)
    x = torch.ones(1, 2, 3 * meant.cells, dtype=dtype)
    layer(x.requires_grad_()).sum().backward()


def _tell(P_world: Partition, meant: Meant) -> list[list[int]]:
    """Integers of the ranks, as partitions tell them."""
    P = _line(P_world, meant)
    count = 4 if meant.other or meant.cells != SAME.cells else 3
    if meant.dtype != SAME.dtype:
        return [P.broadcast_data([1, 2, 3])]
    return P.allgather_data(range(count))


ACTS: dict[str, Act] = {
    "halo_exchange": _halo,
    "nested halo_exchange": lambda P_world, meant: _halo(P_world, meant, nested=True),
    "adjoint of halo_exchange": _adjoint_of_halo,
    "repartition": _repartition,
    "broadcast": _broadcast,
    "sum_reduce": _sum_reduce,
    "all_sum_reduce": _all_sum_reduce,
    "all_gather": _all_gather,
    "sum_scatter": _sum_scatter,
    "scatter": _scatter,
    "gather": _gather,
    "send_recv": _send,
    "conv layer, forward and backward": _convolution,
    "allgather_data": _tell,
}
NAMES = list(ACTS)
KINDS = ("operator", "order", "calls more", "calls fewer", *CHANGES)


def follower_of(name: str) -> str:
    """The operator that is called after it."""
    return NAMES[(NAMES.index(name) + 1) % len(NAMES)]


def sequence(name: str, kind: str, is_odd: bool) -> list[tuple[str, Meant]]:
    """What a rank calls: the same on all but the odd one."""
    once, after = (name, SAME), (follower_of(name), SAME)
    if not is_odd:
        return [once, after]
    if kind in CHANGES:
        return [(name, CHANGES[kind]), after]
    return {
        "operator": [after, after],
        "order": [after, once],
        "calls more": [once, once, after],
        "calls fewer": [after],
    }[kind]
