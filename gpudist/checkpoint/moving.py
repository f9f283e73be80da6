"""Move one tensor of a state dict between its blocks and the whole."""

from __future__ import annotations

from functools import lru_cache

import torch

from gpudist.exchange import Movement, bind, carry_out
from gpudist.geometry.blocks import Decomposition
from gpudist.geometry.cartesian import rank_of
from gpudist.geometry.repartition import plan_repartition
from gpudist.nn.parameters.parameter import bind_parameter
from gpudist.nn.parameters.parameter_placement import ParameterPlacement
from gpudist.nn.partitions import plane
from gpudist.world.partition import CartesianPartition, Partition


def gather_blocks(
    block: torch.Tensor, placement: ParameterPlacement, root: int = 0, to_all: bool = False
) -> torch.Tensor | None:
    """Gather the whole tensor on one rank of the world, or on all.

    Collective over the world.

    Args:
        block: this rank's block, or its placeholder.
        placement: placement of the tensor.
        root: rank of the world that gets the whole tensor.
        to_all: whether every rank gets the whole tensor.

    Returns:
        New tensor on the CPU; ``None`` on ranks that do not get it.

    Cost:
        One message per owner; with ``to_all`` also a broadcast of the whole tensor.
    """
    if placement.shape == ():
        owner = placement.P.ranks[0]
        whole = torch.empty((), dtype=block.dtype)
        _share_cell(block, whole, owner, placement.P.world)
        return whole if to_all or placement.P.world.rank == root else None
    P_world = placement.P.world
    movement = _gathering(placement, block.dtype, tuple(block.shape), root, to_all)
    (whole,) = carry_out((movement,), (block.detach().to(P_world.device),))
    return whole.cpu() if to_all or P_world.rank == root else None


def scatter_blocks(
    whole: torch.Tensor | None, block: torch.Tensor, placement: ParameterPlacement, root: int = 0
) -> None:
    """Copy the whole tensor of one rank of the world into the blocks of all owners.

    Collective over the world.

    Args:
        whole: on the root, tensor of any floating-point dtype and device; ignored elsewhere.
        block: this rank's block, filled in place, or its placeholder.
        placement: placement of the tensor.
        root: rank of the world that has the whole tensor.

    Cost:
        One message per owner; also a broadcast of the blocks if they are replicated.
    """
    P_world = placement.P.world
    if P_world.rank == root:
        assert whole is not None
        given = whole.detach().to(P_world.device, block.dtype)
    else:
        given = torch.empty(0, dtype=block.dtype, device=P_world.device)
    if placement.shape == ():
        kept = block if placement.own_box is not None else block.new_empty(0)
        _share_cell(given, kept, root, P_world)
        return
    (received,) = carry_out((_scattering(placement, block.dtype, root),), (given,))
    if placement.own_box is not None:
        with torch.no_grad():
            block.copy_(received)


def _share_cell(x: torch.Tensor, kept: torch.Tensor, root: int, P_world: Partition) -> None:
    bits = x.detach().cpu().reshape(1).view(torch.uint8).tolist() if P_world.rank == root else None
    values = P_world.broadcast_data(bits, root)
    if kept.numel():
        with torch.no_grad():
            kept.copy_(torch.tensor(values, dtype=torch.uint8).view(x.dtype).view(()))


@lru_cache(maxsize=1024)
def _gathering(
    placement: ParameterPlacement,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    root: int,
    to_all: bool,
) -> Movement:
    P_root = _alone(placement, root)
    gathering = _recut(placement, P_root, dtype, shape, True)
    if not to_all:
        return gathering
    return gathering.then(
        _copying(ParameterPlacement(P_root, _whole(placement), (0,) * P_root.dim), dtype)
    )


@lru_cache(maxsize=1024)
def _scattering(placement: ParameterPlacement, dtype: torch.dtype, root: int) -> Movement:
    scattering = _recut(placement, _alone(placement, root), dtype, (0,), False)
    if not placement.is_replicated:
        return scattering
    first = _first_copies(placement)
    block = torch.empty(first.own_box.shape if first.own_box else (0,), dtype=dtype, device="meta")
    name = "tensor of a state dict"
    return scattering.then(
        bind_parameter(block, first.P, placement.P, placement.cut, name, placement.axes)
    )


def _copying(placement: ParameterPlacement, dtype: torch.dtype) -> Movement:
    """Return the broadcast of a full tensor from its owner to all ranks of the world."""
    P_root = placement.P
    P_world = P_root.world
    P_all = P_world.create_cartesian_topology_partition([P_world.size] + [1] * (P_root.dim - 1))
    block = torch.empty(placement.shape if P_root.active else (0,), dtype=dtype, device="meta")
    return bind_parameter(
        block, P_root, P_all, placement.cut, "tensor of a state dict", placement.axes
    )


def _recut(
    placement: ParameterPlacement,
    P_root: CartesianPartition,
    dtype: torch.dtype,
    placeholder: tuple[int, ...],
    to_root: bool,
) -> Movement:
    """Return the repartition from the first copy of each block to the root, or back."""
    P_world = placement.P.world
    first = _first_copies(placement)
    cut, whole = placement.cut, _whole(placement)
    own = None if first.P.index is None else [first.P.index[axis] for axis in placement.axes]
    own_whole = None if P_root.index is None else (0,) * len(cut.dims)

    def owner_at(index: tuple[int, ...]) -> int:
        full = [0] * first.P.dim
        for axis, i in zip(placement.axes, index, strict=True):
            full[axis] = max(full[axis], i)
        return first.P.ranks[rank_of(full, first.P.shape)]

    def root_at(index: tuple[int, ...]) -> int:
        return P_root.ranks[0]

    blocks, root = (cut, own, owner_at), (whole, own_whole, root_at)
    (source, source_index, source_rank), (target, target_index, target_rank) = (
        (blocks, root) if to_root else (root, blocks)
    )
    rank = P_world.rank
    assert rank is not None
    key = (first.P.digest, P_root.digest, to_root)
    plan = plan_repartition(
        source, target, rank, source_index, target_index, source_rank, target_rank, key
    )
    label = f"{'gather' if to_root else 'scatter'} of a tensor {list(cut.shape)} of a state dict"
    return bind(plan, P_world, label, dtype, placeholder, dtype)


def _first_copies(placement: ParameterPlacement) -> ParameterPlacement:
    return ParameterPlacement(plane(placement.P, placement.axes), placement.cut, placement.axes)


def _whole(placement: ParameterPlacement) -> Decomposition:
    return Decomposition.balanced(placement.shape, (1,) * len(placement.shape))


def _alone(placement: ParameterPlacement, root: int) -> CartesianPartition:
    world: Partition = placement.P.world
    dims = max(1, len(placement.shape))
    return world.create_partition_inclusive([root]).create_cartesian_topology_partition([1] * dims)
