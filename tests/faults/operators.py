"""The table of operators: sample blocks, results in one process, and the call on a partition."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

import gpudist
from gpudist.nn import DistributedConv2d
from gpudist.world.partition import CartesianPartition, Partition
from tests.faults import random_calls
from tests.faults.random_calls import Call

Blocks = Sequence[torch.Tensor | None]
Apply = Callable[[torch.Tensor], torch.Tensor]
ROOT = 1
BY_ROOT = ("shape", "dtype")


@dataclass(frozen=True)
class Meaning:
    """A rank's assumptions about a call.

    Attributes:
        nbytes: bytes of a message.
        has_other_dtype: whether its numbers have another dtype.
        reverses: whether the order of the partitions' workers is reversed.
        other: other arguments of the operator: widths, axes, the root, the kernel.
        known: arguments that say how ranks learn the global shape.
    """

    nbytes: int = 384
    has_other_dtype: bool = False
    reverses: bool = False
    other: bool = False
    known: dict[str, Any] = field(default_factory=dict)


SAME = Meaning()
On = Callable[[Partition, Meaning], Apply]


class Operator(NamedTuple):
    """Row of the table.

    Attributes:
        blocks: input of every rank, given the ranks and the bytes of a message; ``None`` for a rank
            without input.
        alone: output of every rank, by torch in one process.
        on: the operator on a partition, for one rank's input and that rank's assumptions.
        grid: shape of the partition of the input.
        draw: a random call of the operator, with its oracle.
        agreed: disagreements without effect: the root alone decides, or the argument is absent.
        ranks: size of the world.
        is_linear: whether outputs scale with inputs.
        is_packed: whether its messages consist of short rows, so that they are sent in pieces.
        gives: ranks whose input is sent, given the size of the world.
        gets: ranks that have an output.
    """

    blocks: Callable[[int, int], Blocks]
    alone: Callable[[Blocks], Blocks]
    on: On
    grid: Callable[[int], Sequence[int]] = lambda size: [1, size]
    draw: Callable[[random.Random, Partition], Call] | None = None
    agreed: Sequence[str] = ()
    ranks: int = 3
    is_linear: bool = True
    is_packed: bool = True
    gives: Callable[[int], Sequence[int]] = range
    gets: Callable[[int], Sequence[int]] = range


def one(size: int) -> Sequence[int]:
    return [1, 1]


def grid_of(P: Partition, shape: Sequence[int], meaning: Meaning = SAME) -> CartesianPartition:
    ranks = range(P.size)
    P = P.create_partition_inclusive(ranks[::-1]) if meaning.reverses else P
    return P.create_cartesian_topology_partition(shape)


def line(P: Partition, meaning: Meaning = SAME) -> CartesianPartition:
    return grid_of(P, [1, P.size], meaning)


def root_rank(P: Partition, meaning: Meaning) -> int:
    return (ROOT + (meaning.reverses or meaning.other)) % P.size


def root_index(P: Partition, meaning: Meaning) -> int:
    """Return the linear rank of the root."""
    rank = root_rank(P, meaning)
    return P.size - 1 - rank if meaning.reverses else rank


def root_of(P: Partition, meaning: Meaning) -> CartesianPartition:
    root = P.create_partition_inclusive([root_rank(P, meaning)])
    return root.create_cartesian_topology_partition([1, 1])


def the_root(size: int) -> Sequence[int]:
    return [ROOT]


def matrix(rank: int, columns: int, nbytes: int) -> torch.Tensor:
    """Return ``nbytes`` in rows of at most 2 KiB, which are packed and not sent in place."""
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


def halo(P: Partition, meaning: Meaning) -> Apply:
    P_x = line(P, meaning)

    def apply(x: torch.Tensor) -> torch.Tensor:
        widths = [(x.shape[1] // 2, 2 if meaning.other else 1)]
        return gpudist.halo_exchange(x, P_x, halo=widths, periodic=True, **meaning.known)

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


def nested_halo(P: Partition, meaning: Meaning) -> Apply:
    P_x = grid_of(P, [2, 2], meaning)
    widths = [(1, 2 if meaning.other else 1), (1, 1)]
    return lambda x: gpudist.halo_exchange(x, P_x, halo=widths, nested=True, **meaning.known)


def repartition_alone(xs: Blocks) -> Blocks:
    return list(torch.cat(given(xs)).tensor_split(len(xs), 1))


def repartition(P: Partition, meaning: Meaning) -> Apply:
    P_x = grid_of(P, [P.size, 1], meaning)
    P_y = root_of(P, SAME) if meaning.other else line(P, meaning)
    return lambda x: gpudist.repartition(x, P_x, P_y, **meaning.known)


def copies_alone(xs: Blocks) -> Blocks:
    return given(xs) * len(xs)


def broadcast(P: Partition, meaning: Meaning) -> Apply:
    P_root, P_x = root_of(P, meaning), line(P)
    return lambda x: gpudist.broadcast(x, P_root, P_x, **meaning.known)


def dynamic_broadcast(P: Partition, meaning: Meaning) -> Apply:
    P_root, P_x = root_of(P, meaning), line(P)
    return lambda x: gpudist.broadcast(x, P_root, P_x, shape="dynamic")


def broadcast_batch(P: Partition, meaning: Meaning) -> Apply:
    root = root_rank(P, meaning)

    def apply(x: torch.Tensor) -> torch.Tensor:
        batch = {"x": x, "rows": [1, "two"]} if P.rank == root else None
        return gpudist.broadcast_batch(batch, P, root, differentiable=True)["x"]

    return apply


def total(xs: Blocks) -> torch.Tensor:
    return torch.stack(given(xs)).sum(0)


def sum_reduce(P: Partition, meaning: Meaning) -> Apply:
    P_root, P_x = root_of(P, meaning), line(P)
    return lambda x: gpudist.sum_reduce(x, P_x, P_root, **meaning.known)


def axes_of(meaning: Meaning) -> list[int]:
    return [0 if meaning.other else 1]


def all_sum_reduce(P: Partition, meaning: Meaning) -> Apply:
    P_x = line(P, meaning)
    return lambda x: gpudist.all_sum_reduce(x, P_x, axes_of(meaning), **meaning.known)


def scatter(P: Partition, meaning: Meaning) -> Apply:
    P_x = line(P, meaning)
    return lambda x: gpudist.scatter(x, P_x, root_index(P, meaning))


def gather(P: Partition, meaning: Meaning) -> Apply:
    P_x = line(P, meaning)
    return lambda x: gpudist.gather(x, P_x, root_index(P, meaning))


def all_gather(P: Partition, meaning: Meaning) -> Apply:
    P_x = line(P, meaning)
    return lambda x: gpudist.all_gather(x, P_x, axes_of(meaning), **meaning.known)


def sum_scatter(P: Partition, meaning: Meaning) -> Apply:
    P_x = line(P, meaning)
    known: dict[str, Any] = {"shape": "dynamic"} if meaning.known else {}
    return lambda x: gpudist.sum_scatter(x, P_x, axes_of(meaning), **known)


def ring_of_sends(P: Partition, meaning: Meaning) -> Apply:
    """Each rank's block to the next."""
    P_x = line(P, meaning)
    step = 2 if meaning.other else 1
    order = [(rank + step) % P.size for rank in range(P.size)]
    P_y = P_x.create_partition_inclusive(order).create_cartesian_topology_partition(P_x.shape)
    return lambda x: gpudist.send_recv(x, P_x, P_y, **meaning.known)


def images(size: int, nbytes: int) -> Blocks:
    rows = max(4, nbytes // 64)
    return [matrix(rank, 16, 64 * rows).div(1000).reshape(1, 1, rows, 16) for rank in range(size)]


def kernel() -> torch.nn.Conv2d:
    torch.manual_seed(5)
    return torch.nn.Conv2d(1, 2, 3, padding=1, bias=False)


def conv_alone(xs: Blocks) -> Blocks:
    return list(kernel()(torch.cat(given(xs), 3)).tensor_split(len(xs), 3))


def conv_layer(P: Partition, meaning: Meaning) -> Apply:
    torch.manual_seed(5)
    P_x = grid_of(P, [1, 1, 1, P.size], meaning)
    kernel = 5 if meaning.other else 3
    layer = DistributedConv2d(P_x, 1, 2, kernel, padding=kernel // 2, bias=False)
    return lambda x: layer.to(x.dtype)(x)


def sequences(size: int, nbytes: int) -> Blocks:
    """Return query, key and value with as many heads as ranks, side by side."""
    tokens = min(max(4, nbytes // (32 * size)), 256)
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(3, 1, size, tokens, 8, generator=generator) for _ in range(size)]


def attention_alone(xs: Blocks) -> Blocks:
    query, key, value = torch.cat(given(xs), 3).unbind(0)
    y = F.scaled_dot_product_attention(query, key, value)
    return list(y.tensor_split(len(xs), 2))


def ring_attention(P: Partition, meaning: Meaning) -> Apply:
    P_x = grid_of(P, [1, 1, P.size, 1], meaning)
    return lambda x: gpudist.ring_attention(x[0], x[1], x[2], P_x)


def all_to_all_attention(P: Partition, meaning: Meaning) -> Apply:
    P_x = grid_of(P, [1, 1, P.size, 1], meaning)
    return lambda x: gpudist.all_to_all_attention(x[0], x[1], x[2], P_x)


OPERATORS: dict[str, Operator] = {
    "broadcast": Operator(
        at_root(equal_blocks),
        copies_alone,
        broadcast,
        one,
        random_calls.broadcast,
        gives=the_root,
    ),
    "sum_reduce": Operator(
        equal_blocks,
        lambda xs: only_root(total(xs), len(xs)),
        sum_reduce,
        one,
        random_calls.sum_reduce,
        gets=the_root,
    ),
    "all_sum_reduce": Operator(
        equal_blocks,
        lambda xs: [total(xs)] * len(xs),
        all_sum_reduce,
        one,
        random_calls.all_sum_reduce,
    ),
    "repartition": Operator(
        whole_blocks,
        repartition_alone,
        repartition,
        lambda size: [size, 1],
        random_calls.repartition,
    ),
    "halo_exchange": Operator(equal_blocks, halo_alone, halo, draw=random_calls.halo),
    "all_gather": Operator(
        equal_blocks,
        lambda xs: [torch.cat(given(xs), 1)] * len(xs),
        all_gather,
        draw=random_calls.all_gather,
    ),
    "sum_scatter": Operator(
        whole_blocks,
        lambda xs: list(total(xs).tensor_split(len(xs), 1)),
        sum_scatter,
        draw=random_calls.sum_scatter,
    ),
    "scatter": Operator(
        at_root(whole_blocks),
        lambda xs: list(given(xs)[0].tensor_split(len(xs), 1)),
        scatter,
        one,
        random_calls.scatter,
        agreed=BY_ROOT,
        gives=the_root,
    ),
    "gather": Operator(
        equal_blocks,
        lambda xs: only_root(torch.cat(given(xs), 1), len(xs)),
        gather,
        draw=random_calls.gather,
        gives=lambda size: [rank for rank in range(size) if rank != ROOT],
        gets=the_root,
    ),
    "send_recv": Operator(
        equal_blocks,
        lambda xs: [xs[rank - 1] for rank in range(len(xs))],
        ring_of_sends,
        draw=random_calls.send,
    ),
    "halo_exchange, nested": Operator(
        equal_blocks, square_alone, nested_halo, lambda _: [2, 2], ranks=4, is_packed=False
    ),
    "broadcast, dynamic": Operator(
        at_root(equal_blocks), copies_alone, dynamic_broadcast, agreed=BY_ROOT, gives=the_root
    ),
    "broadcast_batch": Operator(
        at_root(equal_blocks),
        copies_alone,
        broadcast_batch,
        agreed=BY_ROOT,
        is_packed=False,
        gives=the_root,
    ),
    "conv layer": Operator(images, conv_alone, conv_layer, is_packed=False),
    "ring attention": Operator(
        sequences,
        attention_alone,
        ring_attention,
        agreed=("kernel",),
        is_linear=False,
        is_packed=False,
    ),
    "all-to-all attention": Operator(
        sequences,
        attention_alone,
        all_to_all_attention,
        agreed=("kernel",),
        is_linear=False,
        is_packed=False,
    ),
}


def drawn(rng: random.Random, P_world: Partition) -> Call:
    """Return a random call; the same on every rank for the same state of ``rng``."""
    draws = [row.draw for row in OPERATORS.values() if row.draw is not None]
    return rng.choice(draws)(rng, P_world)
