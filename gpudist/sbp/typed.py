"""Annotate the parts of global tensors with the types of ``spmd_types``, if that is installed."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from gpudist.checks.arguments import checked
from gpudist.errors import PartitionError
from gpudist.exchange.autograd import move
from gpudist.nn.distributed_module import DistributedModule
from gpudist.ops.operator import Operator
from gpudist.sbp.global_tensor import GlobalTensor
from gpudist.sbp.placement import Placement


def mesh_axes(placement: Placement) -> tuple[Any, ...]:
    """Return the axes of a placement as ``spmd_types.MeshAxis``: sizes and strides of ranks.

    Raises:
        PartitionError: ranks along an axis are not evenly spaced, so ``MeshAxis`` cannot hold them.
    """
    MeshAxis, ranks = import_module("spmd_types").MeshAxis, placement.ranks
    axes: list[Any] = []
    for axis, size in enumerate(placement.shape):
        steps = (ranks.take(range(1, size), axis) - ranks.take(range(size - 1), axis)).flatten()
        distinct = {int(step) for step in steps}
        if len(distinct) > 1 or any(step < 1 for step in distinct):
            raise PartitionError(
                f"{placement!r}, axis {axis}: the steps between ranks are {sorted(distinct)}, but "
                "spmd_types supports only evenly spaced ascending ranks; order the ranks so, or "
                "use x.to_local()"
            )
        axes.append(MeshAxis.of(size, distinct.pop() if distinct else 1))
    return tuple(axes)


@checked()
def to_typed_local(x: GlobalTensor) -> torch.Tensor:
    """Return ``x.to_local()``, typed on every axis of the placement with more than one rank.

    A copy has type R, since its gradient is a term. Terms have type P, blocks type V with the split
    dim.

    Raises:
        ModuleNotFoundError: ``spmd_types`` is not installed.
        PartitionError: see ``mesh_axes``.
    """
    types = import_module("spmd_types")
    # The checker has no rules for movements and layers. Their results have no type until
    # ``assert_type`` gives them one.
    for function in (move, Operator.forward, DistributedModule.__call__):
        types.register_no_typecheck(function)
    with types.no_typecheck():
        local = x.to_local()
    if not x.placement.active:
        return local
    ends = list(zip(mesh_axes(x.placement), x.sbp, x.placement.shape, strict=True))
    words = {"broadcast": types.R, "partial_sum": types.P, "split": types.V}
    local_types = {axis: words[attribute.kind] for axis, attribute, size in ends if size > 1}
    dims = [
        tuple(axis for axis, attribute, size in ends if attribute.dim == dim and size > 1) or None
        for dim in range(x.dim())
    ]
    if not any(dims):
        return types.assert_type(local, local_types)
    return types.assert_type(local, local_types, partition_spec=types.PartitionSpec(*dims))
