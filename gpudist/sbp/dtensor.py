"""Convert torch's DTensor to global tensors and back, without a copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch.distributed.device_mesh import DeviceMesh

from gpudist.checks.arguments import checked, describe
from gpudist.errors import PartitionError, ShapeError
from gpudist.geometry.boxes import Box
from gpudist.geometry.cartesian import index_of
from gpudist.geometry.layout import Layout, NdSbp, Sbp, broadcast, partial_sum, split
from gpudist.sbp.global_tensor import GlobalTensor
from gpudist.sbp.placement import Placement
from gpudist.sbp.to_global import from_part
from gpudist.world.partition import Partition

# Importing torch.distributed.tensor takes most of a second, so it is imported only for a DTensor.
if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, placement_types as words


@checked()
def from_dtensor(x: DTensor, P_world: Partition | None = None) -> GlobalTensor:
    """Convert ``x`` to a global tensor on the ranks of its mesh.

    Collective over the world. ``Shard(d)`` becomes ``split(d)``, with the ``sizes`` of
    ``torch.chunk`` if these are not balanced; ``Replicate()`` becomes ``broadcast``, and
    ``Partial("sum")`` becomes ``partial_sum``.

    Args:
        x: DTensor on a mesh whose ranks are those of the world.
        P_world: world, by default the one of :func:`gpudist.init`.

    Returns:
        A global tensor whose parts share memory with those of ``x``, unless ``x`` is the result of
        ``redistribute(async_op=True)``.

    Adjoint:
        Return the gradient in DTensor's convention, in which gradients of copies and of terms are
        copies. It is summed over axes of copies, where the gradient of a global tensor consists of
        terms.

    Cost:
        No message; in backward an all-reduce if there are copies.

    Raises:
        PartitionError: a placement is not one of the three.
        ShapeError: on every rank alike, if several axes split one dim in blocks of ``torch.chunk``
            that ``sizes`` cannot express.
    """
    if not hasattr(x, "device_mesh"):
        raise ShapeError(f"from_dtensor: x is {describe(x)}; it must be a DTensor")
    placement = Placement.of_mesh(x.device_mesh, P_world)
    shape = tuple(x.shape)
    layout = _in_chunks(placement.layout(_attributes(x.placements), shape))
    remedy = "use x.redistribute to make that dim Replicate(), convert, and split again"
    _require_alike(layout, "DTensor's", remedy)
    back = [layout.dual, _gradient_of_dtensor(layout)]
    return from_part(_wait(x.to_local()), placement, layout, back)


@checked()
def to_dtensor(x: GlobalTensor, mesh: DeviceMesh | None = None) -> DTensor:
    """Convert ``x`` to a DTensor; the inverse of :func:`from_dtensor`.

    Args:
        x: global tensor.
        mesh: mesh of the ranks of the tensor's placement, in its shape; by default a new mesh is
            created, which is collective over torch's world.

    Returns:
        A DTensor whose local tensor shares memory with that of ``x``. Its backward does not reach
        ranks outside the mesh.

    Raises:
        PartitionError: the mesh has other ranks.
        ShapeError: on every rank alike, if the blocks differ from those of ``torch.chunk``; the
            message names attributes that fit.
    """
    from torch.distributed.tensor import DTensor

    mesh = x.placement.to_mesh() if mesh is None else mesh
    if mesh.mesh.tolist() != x.placement.ranks.tolist():
        raise PartitionError(
            f"to_dtensor: the mesh has ranks {mesh.mesh.tolist()}, but the tensor is on "
            f"{x.placement!r}; move it there first: x.to_global(Placement.of_mesh(mesh), sbp)"
        )
    layout = x.global_layout
    chunks = _in_chunks(layout)
    remedy = f"use x.to_global(sbp={chunks.sbp}) first, which has DTensor's blocks"
    if _first_unlike(chunks) is not None:
        remedy = "make that dim broadcast by x.to_global, convert, and split again"
    _require_alike(layout, "this tensor's", remedy)
    local = x.to_local(grad_sbp=_gradient_of_dtensor(layout).sbp)
    strides = _strides(layout.shape, local)
    placements = _placements(x.sbp)
    return DTensor.from_local(local, mesh, placements, shape=x.shape, stride=strides)


def _attributes(placements: Sequence[words.Placement]) -> NdSbp:
    """Return the attributes for DTensor's placements, one per mesh dim."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    attributes: list[Sbp] = []
    for placement in placements:
        if type(placement) is Shard:
            attributes.append(split(placement.dim))
        elif isinstance(placement, Replicate):
            attributes.append(broadcast)
        elif isinstance(placement, Partial) and placement.reduce_op == "sum":
            attributes.append(partial_sum)
        else:
            raise PartitionError(
                f"from_dtensor: {placement} is not supported; the placements must be Shard(dim), "
                "Replicate() or Partial('sum'): use x.redistribute first"
            )
    return tuple(attributes)


def _placements(sbp: NdSbp) -> list[words.Placement]:
    from torch.distributed.tensor import Partial, Replicate, Shard

    others = {broadcast: Replicate(), partial_sum: Partial("sum")}
    return [Shard(attribute.dim) if attribute.is_split else others[attribute] for attribute in sbp]


def _gradient_of_dtensor(layout: Layout) -> Layout:
    sbp = tuple(attribute if attribute.is_split else broadcast for attribute in layout.sbp)
    return layout.with_sbp(sbp)


def _in_chunks(layout: Layout) -> Layout:
    """Return the layout with the blocks of ``torch.chunk``, as far as ``sizes`` express them."""
    attributes: list[Sbp] = []
    blocks = [{extent} for extent in layout.shape]
    for attribute, parts in zip(layout.sbp, layout.grid, strict=True):
        if attribute.is_split:
            attribute, cut = split(attribute.dim), blocks[attribute.dim]
            if len(cut) == 1:
                (extent,) = cut
                ends = [_chunk_of(extent, parts, i) for i in range(parts)]
                attribute = split(attribute.dim, [stop - start for start, stop in ends])
            cuts = [attribute.blocks(extent, parts) for extent in cut]
            blocks[attribute.dim] = {each.length(i) for each in cuts for i in range(parts)}
        attributes.append(attribute)
    return layout.with_sbp(tuple(attributes))


def _first_unlike(layout: Layout) -> int | None:
    indices = (index_of(i, layout.grid) for i in range(len(layout.ranks)))
    unlike = (i for i, at in enumerate(indices) if layout.box(at) != _chunk(layout, at))
    return next(unlike, None)


def _require_alike(layout: Layout, whose: str, remedy: str) -> None:
    """Raise if the blocks of the layout differ from those of ``torch.chunk``."""
    unlike = _first_unlike(layout)
    if unlike is None:
        return
    index = index_of(unlike, layout.grid)
    raise ShapeError(
        f"{whose} blocks of shape {list(layout.shape)} by {layout.sbp} on a grid of "
        f"{list(layout.grid)} differ from DTensor's: rank {layout.ranks[unlike]} holds "
        f"{list(layout.box(index).shape)} of a global tensor, but "
        f"{list(_chunk(layout, index).shape)} of a DTensor, which torch.chunk cuts into blocks of "
        f"ceil(n / p) cells and a remainder; {remedy}"
    )


def _chunk(layout: Layout, index: tuple[int, ...]) -> Box:
    """Return the cells that the rank at ``index`` of a DTensor holds, as cut by torch.chunk."""
    start, stop = [0] * len(layout.shape), list(layout.shape)
    for attribute, parts, i in zip(layout.sbp, layout.grid, index, strict=True):
        if attribute.is_split:
            low = start[attribute.dim]
            first, end = _chunk_of(stop[attribute.dim] - low, parts, i)
            start[attribute.dim], stop[attribute.dim] = low + first, low + end
    return Box(tuple(start), tuple(stop))


def _chunk_of(extent: int, parts: int, index: int) -> tuple[int, int]:
    size = -(-extent // parts)
    return min(index * size, extent), min((index + 1) * size, extent)


def _strides(shape: tuple[int, ...], local: torch.Tensor) -> tuple[int, ...]:
    """Return strides of a dense tensor whose dims have the memory order of ``local``."""
    dims = list(range(len(shape)))
    if local.dim() == len(shape):
        dims.sort(key=lambda d: -local.stride(d))
    strides, step = [1] * len(shape), 1
    for d in reversed(dims):
        strides[d] = step
        step *= max(shape[d], 1)
    return tuple(strides)


def _wait(local: torch.Tensor) -> torch.Tensor:
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    # DTensor's own wait would detach the result from the graph.
    return local.clone() if isinstance(local, AsyncCollectiveTensor) else local
