"""Scatter and gather: repartitions from and to a single worker."""

from __future__ import annotations

import torch
from torch.compiler import is_dynamo_compiling

from gpudist.checks.storage import storage_problem
from gpudist.errors import ShapeError
from gpudist.ops.agreement import ShapeMode
from gpudist.ops.arrays import Array, applied
from gpudist.ops.operator import remembered, zero_volume_tensor
from gpudist.ops.repartition import Repartition
from gpudist.world.partition import CartesianPartition


class Scatter(Repartition):
    """Cut the root's tensor into balanced blocks on ``P_x``; see :func:`scatter`."""

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
            # A tensor off the root is ignored, but its graph is not: its backward takes part on
            # this rank.
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
                ShapeError("Scatter: the root gave no tensor; only the other workers may pass None")
            )
        return super().forward(x)


class Gather(Repartition):
    """Put the blocks on ``P_x`` together on the root; see :func:`gather`."""

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
    """Cut the tensor of worker ``root`` of ``P_x`` into balanced blocks, one per worker.

    Collective over ``P_x``.

    Args:
        x: the whole tensor on the root, or a NumPy or CuPy array. Elsewhere only whether it is a
            tensor or an array counts, and with ``"static"`` its ``requires_grad``, which must be
            the root's where gradients are wanted; ``None`` stands for one like the root's that
            does not require grad.
        P_x: one axis per dim of the tensor.
        root: rank in ``P_x`` of the worker that has the tensor.
        preserve_batch: see :func:`~gpudist.repartition`.
        shape: ``"dynamic"`` tells the blocks' shape at every call; ``"static"`` remembers the
            first.

    Returns:
        New tensor, or array if ``x`` is one: this worker's block, or a zero-volume one outside
        ``P_x``.

    Adjoint:
        Gather of the blocks' gradients on the root.

    Cost:
        One message per worker; with ``"dynamic"`` also one small all-gather.

    Source:
        Hewett & Grady 2020, arXiv:2006.03108, section 3.
    """
    return applied(remembered(Scatter, P_x, root, preserve_batch, shape=shape), x)


def gather(
    x: Array,
    P_x: CartesianPartition,
    root: int = 0,
    preserve_batch: bool = True,
    *,
    shape: ShapeMode = "dynamic",
) -> Array:
    """Put the blocks on ``P_x`` together on its worker ``root``.

    Collective over ``P_x``.

    Args:
        x: the block, a tensor or a NumPy or CuPy array, of any size that makes up a cut of one
            tensor.
        P_x: one axis per dim of the tensor.
        root: rank in ``P_x`` of the worker that gets the tensor.
        preserve_batch: other workers get ``(batch, 0)`` instead of ``(0,)``.
        shape: ``"dynamic"`` tells the blocks' shapes at every call; ``"static"`` remembers the
            first.

    Returns:
        New tensor, or array if ``x`` is one: the whole on the root, a zero-volume one elsewhere.

    Adjoint:
        Scatter of the gradient.

    Cost:
        One message per worker; with ``"dynamic"`` also one small all-gather.

    Source:
        Hewett & Grady 2020, arXiv:2006.03108, section 3.
    """
    return applied(remembered(Gather, P_x, root, preserve_batch, shape=shape), x)
