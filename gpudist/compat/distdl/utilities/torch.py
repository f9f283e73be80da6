"""Placeholders and structures of tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import gpudist.ops.operator as operator


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
