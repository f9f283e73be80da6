"""Every operator as a table: of blocks, by one process, and distributed over a partition."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

import gpudist
from gpudist import zero_volume_tensor
from gpudist.nn import DistributedConv2d
from gpudist.world.partition import CartesianPartition, Partition

Blocks = Sequence[torch.Tensor | None]
Apply = Callable[[torch.Tensor], torch.Tensor]
ROOT = 1


class Operator(NamedTuple):
    """One row.

    Attributes:
        blocks: the input of every rank, of so many ranks and bytes in a message; ``None`` where a
            rank has none.
        alone: the output of every rank, by torch in one process.
        on: the operator on a partition, for one rank's input.
        ranks: of the world.
        is_linear: outputs are scaled like inputs.
        is_packed: its messages are of short rows, so that they go piece by piece.
        gives: ranks whose input is sent, in a world of so many.
        gets: ranks that have an output.
    """

    blocks: Callable[[int, int], Blocks]
    alone: Callable[[Blocks], Blocks]
    on: Callable[[Partition], Apply]
    ranks: int = 3
    is_linear: bool = True
    is_packed: bool = True
    gives: Callable[[int], Sequence[int]] = range
    gets: Callable[[int], Sequence[int]] = range


def line(P: Partition) -> CartesianPartition:
    return P.create_cartesian_topology_partition([1, P.size])


def root_of(P: Partition) -> CartesianPartition:
    return P.create_partition_inclusive([ROOT]).create_cartesian_topology_partition([1, 1])


def the_root(size: int) -> Sequence[int]:
    return [ROOT]


def matrix(rank: int, columns: int, nbytes: int) -> torch.Tensor:
    """Of so many bytes, in rows of at most 2 KiB, which are packed and not lent."""
    rows = max(2, nbytes // (4 * columns))
    cells = torch.arange(rows * columns).reshape(rows, columns)
    return ((7 * cells + 31 * rank) % 1000 + 1).float()


def columns_of(nbytes: int) -> int:
    return 512 if nbytes >= 64 * 1024 else 24


def equal_blocks(size: int, nbytes: int) -> Blocks:
    return [matrix(rank, columns_of(nbytes), nbytes) for rank in range(size)]


def whole_blocks(size: int, nbytes: int) -> Blocks:
    """Each so large that the part for one rank has this many bytes."""
    return [matrix(rank, size * columns_of(nbytes), size * nbytes) for rank in range(size)]


def at_root(blocks: Callable[[int, int], Blocks]) -> Callable[[int, int], Blocks]:
    def made(size: int, nbytes: int) -> Blocks:
        return [x if rank == ROOT else None for rank, x in enumerate(blocks(size, nbytes))]

    return made


def given(xs: Blocks) -> list[torch.Tensor]:
    return [x for x in xs if x is not None]


def only_root(y: torch.Tensor, size: int) -> Blocks:
    return [y if rank == ROOT else None for rank in range(size)]


def halo_alone(xs: Blocks) -> Blocks:
    blocks = given(xs)
    half = blocks[0].shape[1] // 2
    n = len(blocks)
    return [
        torch.cat([blocks[r - 1][:, -half:], blocks[r], blocks[(r + 1) % n][:, :1]], 1)
        for r in range(n)
    ]


def halo(P: Partition) -> Apply:
    P_x = line(P)

    def apply(x: torch.Tensor) -> torch.Tensor:
        widths = [(x.shape[1] // 2, 1)]
        return gpudist.halo_exchange(x, P_x, halo=widths, periodic=True)

    return apply


def square_alone(xs: Blocks) -> Blocks:
    a, b, c, d = given(xs)
    rows, columns = a.shape
    whole = F.pad(torch.cat([torch.cat([a, b], 1), torch.cat([c, d], 1)]), (1, 1, 1, 1))
    return [
        whole[i * rows : (i + 1) * rows + 2, j * columns : (j + 1) * columns + 2]
        for i in range(2)
        for j in range(2)
    ]


def nested_halo(P: Partition) -> Apply:
    P_x = P.create_cartesian_topology_partition([2, 2])
    return lambda x: gpudist.halo_exchange(x, P_x, halo=[(1, 1), (1, 1)], nested=True)


def repartition_alone(xs: Blocks) -> Blocks:
    return list(torch.cat(given(xs)).tensor_split(len(xs), 1))


def repartition(P: Partition) -> Apply:
    P_x = P.create_cartesian_topology_partition([P.size, 1])
    P_y = P.create_cartesian_topology_partition([1, P.size])
    return lambda x: gpudist.repartition(x, P_x, P_y)


def copies_alone(xs: Blocks) -> Blocks:
    return given(xs) * len(xs)


def broadcast(P: Partition) -> Apply:
    P_root, P_x = root_of(P), line(P)
    return lambda x: gpudist.broadcast(x, P_root, P_x)


def dynamic_broadcast(P: Partition) -> Apply:
    P_root, P_x = root_of(P), line(P)
    return lambda x: gpudist.broadcast(x, P_root, P_x, shape="dynamic")


def broadcast_batch(P: Partition) -> Apply:
    def apply(x: torch.Tensor) -> torch.Tensor:
        batch = {"x": x, "rows": [1, "two"]} if P.rank == ROOT else None
        return gpudist.broadcast_batch(batch, P, ROOT, differentiable=True)["x"]

    return apply


def total(xs: Blocks) -> torch.Tensor:
    return torch.stack(given(xs)).sum(0)


def sum_reduce(P: Partition) -> Apply:
    P_root, P_x = root_of(P), line(P)
    return lambda x: gpudist.sum_reduce(x, P_x, P_root)


def all_sum_reduce(P: Partition) -> Apply:
    P_x = line(P)
    return lambda x: gpudist.all_sum_reduce(x, P_x, [1])


def scatter(P: Partition) -> Apply:
    P_x = line(P)
    return lambda x: gpudist.scatter(x, P_x, ROOT)


def gather(P: Partition) -> Apply:
    P_x = line(P)
    return lambda x: gpudist.gather(x, P_x, ROOT)


def all_gather(P: Partition) -> Apply:
    P_x = line(P)
    return lambda x: gpudist.all_gather(x, P_x, [1])


def sum_scatter(P: Partition) -> Apply:
    P_x = line(P)
    return lambda x: gpudist.sum_scatter(x, P_x, [1])


def ring_of_sends(P: Partition) -> Apply:
    """Each rank's block to the next, one message after the other."""
    alone = [P.create_partition_inclusive([rank]) for rank in range(P.size)]

    def apply(x: torch.Tensor) -> torch.Tensor:
        kept, rest = x, []
        for source in range(P.size):
            target = (source + 1) % P.size
            block = x if P.rank == source else zero_volume_tensor(requires_grad=True)
            y = gpudist.send_recv(block, alone[source], alone[target])
            if P.rank == target:
                kept = y
            else:
                rest.append(y.sum())
        return kept + torch.stack(rest).sum()

    return apply


def images(size: int, nbytes: int) -> Blocks:
    rows = max(4, nbytes // 64)
    return [matrix(rank, 16, 64 * rows).div(1000).reshape(1, 1, rows, 16) for rank in range(size)]


def kernel() -> torch.nn.Conv2d:
    torch.manual_seed(5)
    return torch.nn.Conv2d(1, 2, 3, padding=1, bias=False)


def conv_alone(xs: Blocks) -> Blocks:
    return list(kernel()(torch.cat(given(xs), 3)).tensor_split(len(xs), 3))


def conv_layer(P: Partition) -> Apply:
    torch.manual_seed(5)
    P_x = P.create_cartesian_topology_partition([1, 1, 1, P.size])
    return DistributedConv2d(P_x, 1, 2, 3, padding=1, bias=False)


def sequences(size: int, nbytes: int) -> Blocks:
    """Query, key and value of so many heads as ranks, side by side."""
    tokens = min(max(4, nbytes // (32 * size)), 256)
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(3, 1, size, tokens, 8, generator=generator) for _ in range(size)]


def attention_alone(xs: Blocks) -> Blocks:
    query, key, value = torch.cat(given(xs), 3).unbind(0)
    y = F.scaled_dot_product_attention(query, key, value)
    return list(y.tensor_split(len(xs), 2))


def ring_attention(P: Partition) -> Apply:
    P_x = P.create_cartesian_topology_partition([1, 1, P.size, 1])
    return lambda x: gpudist.ring_attention(x[0], x[1], x[2], P_x)


def all_to_all_attention(P: Partition) -> Apply:
    P_x = P.create_cartesian_topology_partition([1, 1, P.size, 1])
    return lambda x: gpudist.all_to_all_attention(x[0], x[1], x[2], P_x)


OPERATORS: dict[str, Operator] = {
    "halo_exchange": Operator(equal_blocks, halo_alone, halo),
    "halo_exchange, nested": Operator(
        equal_blocks, square_alone, nested_halo, ranks=4, is_packed=False
    ),
    "repartition": Operator(whole_blocks, repartition_alone, repartition),
    "broadcast": Operator(at_root(equal_blocks), copies_alone, broadcast, gives=the_root),
    "broadcast, dynamic": Operator(
        at_root(equal_blocks), copies_alone, dynamic_broadcast, gives=the_root
    ),
    "broadcast_batch": Operator(
        at_root(equal_blocks), copies_alone, broadcast_batch, is_packed=False, gives=the_root
    ),
    "sum_reduce": Operator(
        equal_blocks, lambda xs: only_root(total(xs), len(xs)), sum_reduce, gets=the_root
    ),
    "all_sum_reduce": Operator(equal_blocks, lambda xs: [total(xs)] * len(xs), all_sum_reduce),
    "scatter": Operator(
        at_root(whole_blocks),
        lambda xs: list(given(xs)[0].tensor_split(len(xs), 1)),
        scatter,
        gives=the_root,
    ),
    "gather": Operator(
        equal_blocks,
        lambda xs: only_root(torch.cat(given(xs), 1), len(xs)),
        gather,
        gives=lambda size: [rank for rank in range(size) if rank != ROOT],
        gets=the_root,
    ),
    "all_gather": Operator(
        equal_blocks, lambda xs: [torch.cat(given(xs), 1)] * len(xs), all_gather
    ),
    "sum_scatter": Operator(
        whole_blocks, lambda xs: list(total(xs).tensor_split(len(xs), 1)), sum_scatter
    ),
    "send_recv": Operator(
        equal_blocks, lambda xs: [xs[rank - 1] for rank in range(len(xs))], ring_of_sends
    ),
    "conv layer": Operator(images, conv_alone, conv_layer, is_packed=False),
    "ring attention": Operator(
        sequences, attention_alone, ring_attention, is_linear=False, is_packed=False
    ),
    "all-to-all attention": Operator(
        sequences, attention_alone, all_to_all_attention, is_linear=False, is_packed=False
    ),
}
