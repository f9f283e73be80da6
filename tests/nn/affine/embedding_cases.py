"""Embeddings against torch's: output and gradient of the table, block by block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gpudist.nn import DistributedEmbedding
from gpudist.world.partition import CartesianPartition, Partition
from tests.nn.compare import (
    Cut,
    Slices,
    assert_block_of,
    assert_parameter_gradients,
    build_both,
    own_block,
    own_slices,
    random_like_all,
)
from tests.nn.placing import Placing

Partitions = tuple[CartesianPartition, CartesianPartition | None, CartesianPartition | None]


def indices_of(shape: Sequence[int], rows: int, seed: int = 3) -> torch.Tensor:
    """The same random rows on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, rows, tuple(shape), generator=generator)


def owned_by(partitions: Partitions) -> Any:
    """Return the slices of this rank's block of the table."""
    P_x, _, P_w = partitions

    def owned(name: str, shape: torch.Size) -> Slices | None:
        if P_w is None:
            return tuple(slice(0, n) for n in shape) if P_x.rank == 0 else None
        if P_w.index is None or any(P_w.index[:-2]):
            return None
        # The first workers along the leading axes come first in the partition.
        first = P_w.create_partition_inclusive(range(P_w.shape[-2] * P_w.shape[-1]))
        return own_slices(shape, first.create_cartesian_topology_partition(P_w.shape[-2:]))

    return owned


def check_embedding(
    partitions: Partitions,
    table: tuple[int, int],
    indices: Sequence[torch.Tensor],
    sizes: Cut | None = None,
    tolerance: float = 1e-10,
    layer_options: dict[str, Any] | None = None,
    placing: Placing | None = None,
    **options: Any,
) -> None:
    """Compare both layers on several tensors of indices, including double backward."""
    P_x, P_y, P_w = partitions
    options = {"dtype": torch.float64, **options}
    others = () if P_y is None else (P_y, P_w)
    placing = placing or Placing({}, owned_by(partitions))
    owned = placing.owned
    given = {**options, **placing.options, **(layer_options or {})}
    sequential, layer = build_both(
        lambda: torch.nn.Embedding(*table, **options),
        lambda: placing.around(DistributedEmbedding(P_x, *others, *table, **given)),  # pyright: ignore
        owned,
    )
    if P_y is None:
        P_y = P_x.create_cartesian_topology_partition((*P_x.shape, 1))
    for whole in indices:
        y_whole, y = sequential(whole), layer(own_block(whole, P_x, sizes, requires_grad=False))
        where = own_slices(y_whole.shape, P_y, sizes)
        assert_block_of(y.detach(), y_whole.detach(), where, "output", tolerance)
        assert y.requires_grad == (y_whole.requires_grad and takes_part(partitions))
        if not y.requires_grad:
            continue
        cotangent = random_like_all(y_whole.shape, 5).to(y.dtype)
        for module, out, part in ((sequential, y_whole, (...,)), (layer, y, where)):
            module.zero_grad()
            out.backward(torch.zeros_like(out) if part is None else cotangent[part])
        assert_parameter_gradients(sequential, layer, owned, tolerance)


def takes_part(partitions: Partitions) -> bool:
    return any(P is not None and P.active for P in partitions)


def world_grid(
    P_world: Partition, shape: Sequence[int] | None, ranks: Sequence[int] | None
) -> CartesianPartition | None:
    if shape is None:
        return None
    size = torch.Size(shape).numel()
    members = P_world.create_partition_inclusive(range(size) if ranks is None else ranks)
    return members.create_cartesian_topology_partition(shape)
