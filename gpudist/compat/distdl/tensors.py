"""Placeholders and structures of tensors, and shapes of their blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import gpudist.ops.operator as operator
from gpudist.compat.distdl.partition import MPICartesianPartition, MPIPartition


def zero_volume_tensor(
    b: int | None = None,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """Return the tensor of a worker without a block: shape ``(0,)``, or ``(b, 0)``.

    Args:
        b: extent of dim 0, if the placeholder shows the batch size.
        dtype, requires_grad, device: see ``torch.empty``.

    Returns:
        New tensor without cells.
    """
    return operator.zero_volume_tensor(b, dtype=dtype, device=device, requires_grad=requires_grad)


class TensorStructure:
    """Shape, dtype and ``requires_grad`` of a tensor; ``None`` if unknown.

    Args:
        tensor: tensor, or another structure, to take them from.
    """

    def __init__(self, tensor: Any = None) -> None:
        self.shape: Any = None
        self.dtype: torch.dtype | None = None
        self.requires_grad: bool | None = None
        if tensor is not None:
            self.fill_from_tensor(tensor)

    def fill_from_tensor(self, tensor: Any) -> None:
        """Take shape, dtype and ``requires_grad`` of ``tensor``."""
        self.shape, self.dtype = tensor.shape, tensor.dtype
        self.requires_grad = tensor.requires_grad

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, TensorStructure)
            and np.array_equal(self.shape, other.shape)
            and (self.dtype, self.requires_grad) == (other.dtype, other.requires_grad)
        )

    __hash__ = None  # type: ignore[assignment]


def distdl_padding_to_torch_padding(pad: Any) -> tuple[int, ...]:
    """Return widths ``[left, right]`` per dim in the order of ``torch.nn.functional.pad``."""
    return tuple(int(width) for widths in reversed(list(pad)) for width in widths)


class ZeroVolumeCorrectorFunction:
    """Function that turns a zero-volume tensor into a number, so that ``backward`` can start."""

    @staticmethod
    def apply(input: torch.Tensor) -> torch.Tensor:
        """Return a copy of ``input``, or 0 if it has no cells.

        Adjoint:
            Copy of the gradient, or a zero-volume tensor.
        """
        return input.clone() if input.numel() else input.sum()


# In the order of their names, which is the same on all ranks.
_DTYPES = sorted({x for x in vars(torch).values() if isinstance(x, torch.dtype)}, key=str)


def assemble_global_tensor_structure(
    local_tensor_structure: Any, P_in: MPICartesianPartition, P_out: MPIPartition | None = None
) -> TensorStructure:
    """Return the shape, dtype and ``requires_grad`` of a tensor split over ``P_in``. Collective.

    Args:
        local_tensor_structure: this worker's block, or its structure.
        P_in: partition of the tensor, one axis per dim.
        P_out: partition that contains ``P_in``; its members get the structure too.

    Returns:
        Structure with an array as shape; empty on workers of neither partition.
    """
    structure = TensorStructure()
    facts = None
    if P_in.active:
        block = local_tensor_structure
        sizes = P_in.allgather_data(list(block.shape)).reshape(*P_in.shape, P_in.dim)
        lines = [
            sizes[(*P_in.index[:d], slice(None), *P_in.index[d + 1 :], d)] for d in range(P_in.dim)
        ]
        facts = [_DTYPES.index(block.dtype), block.requires_grad, *(line.sum() for line in lines)]
    if P_out is not None and P_out.active:
        facts = P_out.broadcast_data(facts, P_data=P_in)
    if facts is not None:
        dtype, requires_grad, *shape = facts
        structure.shape, structure.dtype = np.array(shape), _DTYPES[dtype]
        structure.requires_grad = bool(requires_grad)
    return structure


def compute_subtensor_shapes_unbalanced(
    local_tensor_structure: Any, P_in: MPICartesianPartition, P_out: MPIPartition | None = None
) -> NDArray[Any] | None:
    """Return the shapes of all blocks of a tensor split over ``P_in``. Collective.

    Args:
        local_tensor_structure: this worker's block, or its structure.
        P_in: partition of the tensor, one axis per dim.
        P_out: partition that contains ``P_in``; its members get the shapes too.

    Returns:
        Array of shape ``[*P_in.shape, dims]``; ``None`` on workers of neither partition.
    """
    shapes = None
    if P_in.active:
        shapes = P_in.allgather_data(list(local_tensor_structure.shape))
        shapes = shapes.reshape(*P_in.shape, P_in.dim)
    if P_out is not None and P_out.active:
        shapes = P_out.broadcast_data(shapes, P_data=P_in)
    return shapes
