"""Move one tensor of a state dict between its blocks and the whole."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from gpudist.convert.parameters import if_imported
from gpudist.exchange import Movement, bind, carry_out
from gpudist.nn.parameters.parameter import bind_parameter
from gpudist.nn.parameters.parameter_placement import ParameterPlacement, plan_recut
from gpudist.world.partition import Partition, cache_in_world


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
        whole = gather_blocks(block.reshape(-1), _of_one_cell(placement), root, to_all)
        return None if whole is None else whole.view(())
    P_world, dtype = placement.P.world, block.dtype
    bits = block.detach().to(P_world.device).view(_integer_of_same_size(dtype))
    movement = _bind_gather(P_world, placement, bits.dtype, tuple(block.shape), root, to_all)
    (whole,) = carry_out((movement,), (bits,))
    return whole.cpu().view(dtype) if to_all or P_world.rank == root else None


def scatter_blocks(
    whole: torch.Tensor | None, block: torch.Tensor, placement: ParameterPlacement, root: int = 0
) -> None:
    """Copy the whole tensor of one rank of the world into the blocks of all owners.

    Collective over the world.

    Args:
        whole: on the root, tensor of the block's dtype on any device; ignored elsewhere.
        block: this rank's block, filled in place, or its placeholder.
        placement: placement of the tensor.
        root: rank of the world that has the whole tensor.

    Cost:
        One message per owner; also a broadcast of the blocks if they are replicated.
    """
    if placement.shape == ():
        whole = None if whole is None else whole.reshape(-1)
        scatter_blocks(whole, block.detach().view(-1), _of_one_cell(placement), root)
        return
    P_world = placement.P.world
    if P_world.rank == root:
        assert whole is not None
        source = whole.detach().to(P_world.device)
    else:
        source = torch.empty(0, dtype=block.dtype, device=P_world.device)
    dtype = _integer_of_same_size(block.dtype)
    (received,) = carry_out(
        (_bind_scatter(P_world, placement, dtype, root),), (source.view(dtype),)
    )
    if placement.own_box is not None:
        with torch.no_grad():
            block.copy_(received.view(block.dtype))


def is_sharded(x: Any) -> bool:
    """Return whether ``x`` is torch's DTensor, of FSDP2 or tensor parallelism."""
    kind: Any = if_imported("torch.distributed.tensor", "DTensor")
    return kind is not None and isinstance(x, kind)


def whole_of(x: Any) -> Any:
    """Return the whole tensor of a DTensor, collective over its mesh; any other value as it is."""
    return x.full_tensor().cpu() if is_sharded(x) else x


@contextmanager
def filled(x: Any) -> Iterator[torch.Tensor]:
    """Yield the tensor to fill for ``x``: a whole one for a DTensor, which then gets its part."""
    if not is_sharded(x):
        yield x
        return
    whole = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    yield whole
    part: Any = sys.modules["torch.distributed.tensor"]
    x.copy_(part.distribute_tensor(whole, x.device_mesh, x.placements, src_data_rank=None))


def _integer_of_same_size(dtype: torch.dtype) -> torch.dtype:
    # Every transport carries integers, and copies do not change bits.
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(
        dtype.itemsize, dtype
    )


def _of_one_cell(placement: ParameterPlacement) -> ParameterPlacement:
    # Movements need a dim.
    return ParameterPlacement.on(placement.P, (1,))


@cache_in_world
def _bind_gather(
    P_world: Partition,
    placement: ParameterPlacement,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    root: int,
    to_all: bool,
) -> Movement:
    whole = _whole_on(placement, root)
    gathering = _recut("gather", placement.first_copies, whole, dtype, shape)
    if not to_all:
        return gathering
    return gathering.then(_bind_copy(whole, P_world, dtype))


@cache_in_world
def _bind_scatter(
    P_world: Partition, placement: ParameterPlacement, dtype: torch.dtype, root: int
) -> Movement:
    first = placement.first_copies
    scattering = _recut("scatter", _whole_on(placement, root), first, dtype, (0,))
    if not placement.is_replicated:
        return scattering
    return scattering.then(_bind_copy(first, placement.P, dtype))


def _bind_copy(source: ParameterPlacement, P: Partition, dtype: torch.dtype) -> Movement:
    return bind_parameter(source, P, dtype, "tensor of a state dict")


def _recut(
    verb: str,
    source: ParameterPlacement,
    target: ParameterPlacement,
    dtype: torch.dtype,
    placeholder: tuple[int, ...],
) -> Movement:
    P_world = source.P.world
    label = f"{verb} of a tensor {list(source.shape)} of a state dict"
    plan = plan_recut(source, target, P_world)
    return bind(plan, P_world, label, dtype, placeholder, dtype)


def _whole_on(placement: ParameterPlacement, root: int) -> ParameterPlacement:
    P_root = placement.P.world.create_partition_inclusive([root])
    return ParameterPlacement.on(P_root, placement.shape)
