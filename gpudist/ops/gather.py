"""Scatter and gather: repartitions from and to a single worker."""

from __future__ import annotations

import torch
from torch.compiler import is_dynamo_compiling

from gpudist.checks.storage import storage_problem
from gpudist.errors import ShapeError
from gpudist.ops.arrays import Array, apply_to_array
from gpudist.ops.operator import cached_operator, zero_volume_tensor
from gpudist.ops.operators import operator
from gpudist.ops.repartition import Repartition
from gpudist.ops.shape_agreement import ShapeMode
from gpudist.world.partition import CartesianPartition


@operator("gather", lambda kind, P_x: kind(P_x, root=P_x.size - 1), (5, 3))
class Scatter(Repartition):
    """Split the root's tensor into balanced blocks on ``P_x``; see :func:`scatter`.

    Args:
        P_x ... shape: see :func:`scatter`.
    """

    def __init__(
        self,
        P_x: CartesianPartition,
        root: int = 0,
        preserve_batch: bool = True,
        *,
        shape: ShapeMode = "dynamic",
    ) -> None:
        super().__init__(_root_of(P_x, root), P_x, preserve_batch, shape=shape)

    def forward(self, x: torch.Tensor | None = None) -> torch.Tensor:
        if not self.P_x.active:
            # A tensor on another rank than root is ignored, but not its graph, since backward is
            # collective.
            x = zero_volume_tensor(device=self.P_x.device) if x is None else x
            if not isinstance(x, torch.Tensor):
                self.require_tensor(x)
            if not is_dynamo_compiling() and storage_problem(x):
                x = zero_volume_tensor(
                    dtype=x.dtype, device=x.device, requires_grad=x.requires_grad
                )
            x = x if x.numel() == 0 else x.reshape(-1)[:0]
        if x is None:
            self.agreement.refuse(
                ShapeError(
                    "Scatter: x is None on the root, which must pass the tensor; only other "
                    "workers may pass None"
                )
            )
        return super().forward(x)


@operator("scatter", lambda kind, P_x: kind(P_x, root=P_x.size - 1), (5, 3))
class Gather(Repartition):
    """Gather the blocks on ``P_x`` on the root; see :func:`gather`.

    Args:
        P_x ... shape: see :func:`gather`.
    """

    def __init__(
        self,
        P_x: CartesianPartition,
        root: int = 0,
        preserve_batch: bool = True,
        *,
        shape: ShapeMode = "dynamic",
    ) -> None:
        super().__init__(P_x, _root_of(P_x, root), preserve_batch, shape=shape)


def _root_of(P_x: CartesianPartition, root: int) -> CartesianPartition:
    alone = P_x.create_partition_inclusive([root])
    return alone.create_cartesian_topology_partition([1] * P_x.dim)


def scatter(
    x: Array | None,
    P_x: CartesianPartition,
    root: int = 0,
    preserve_batch: bool = True,
    *,
    shape: ShapeMode = "dynamic",
) -> Array:
    """Split the tensor of worker ``root`` of ``P_x`` into balanced blocks, one per worker.

    Collective over ``P_x``.

    Args:
        x: whole tensor on the root, or a NumPy or CuPy array. On other workers, only its kind
            (tensor or array) matters and, with ``"static"``, its ``requires_grad``, which must
            equal the root's if gradients are needed. ``None`` stands for the root's kind, without
            grad.
        P_x: partition with one axis per dim of the tensor.
        root: rank in ``P_x`` of the worker that holds the tensor.
        preserve_batch: see :func:`~gpudist.repartition`.
        shape: ``"dynamic"`` makes the ranks agree on the shape at every call; ``"static"`` only at
            the first.

    Returns:
        New tensor, or array if ``x`` is one: this worker's block, or a zero-volume tensor outside
        ``P_x``.

    Adjoint:
        Gather of the blocks' gradients on the root.

    Cost:
        One message per worker; with ``"dynamic"`` also one small all-gather.

    Source:
        Hewett & Grady 2020, arXiv:2006.03108, section 3.
    """
    return apply_to_array(cached_operator(Scatter, P_x, (root, preserve_batch, shape)), x)


def gather(
    x: Array,
    P_x: CartesianPartition,
    root: int = 0,
    preserve_batch: bool = True,
    *,
    shape: ShapeMode = "dynamic",
) -> Array:
    """Gather the blocks on ``P_x`` on its worker ``root``.

    Collective over ``P_x``.

    Args:
        x: this worker's block, a tensor or a NumPy or CuPy array; blocks may have any sizes that
            form a decomposition of one tensor.
        P_x: partition with one axis per dim of the tensor.
        root: rank in ``P_x`` of the worker that gets the tensor.
        preserve_batch: other workers get ``(batch, 0)`` instead of ``(0,)``.
        shape: ``"dynamic"`` makes the ranks agree on the shapes at every call; ``"static"`` only at
            the first.

    Returns:
        New tensor, or array if ``x`` is one: the whole tensor on the root, a zero-volume one
        elsewhere.

    Adjoint:
        Scatter of the gradient.

    Cost:
        One message per worker; with ``"dynamic"`` also one small all-gather.

    Source:
        Hewett & Grady 2020, arXiv:2006.03108, section 3.
    """
    return apply_to_array(cached_operator(Gather, P_x, (root, preserve_batch, shape)), x)
