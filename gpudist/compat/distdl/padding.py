"""Cells added to the sides of a block, or removed from them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from gpudist.compat.distdl.tensors import distdl_padding_to_torch_padding


class PadNd(torch.nn.Module):
    """Pad a block with a constant.

    Args:
        pad_width: array of shape ``[dims, 2]`` with the cells on the left and right; ``None`` pads
            nothing.
        value: value of the new cells.
    """

    def __init__(self, pad_width: Any, value: float = 0) -> None:
        super().__init__()
        self.pad_width = pad_width
        self.value = value

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.pad_width is None:
            return input.clone()
        return F.pad(input, distdl_padding_to_torch_padding(self.pad_width), value=self.value)


class UnpadNd(PadNd):
    """Remove cells from the sides of a block.

    Args:
        pad_width: array of shape ``[dims, 2]`` with the cells on the left and right; ``None``
            removes nothing.
        value: ignored.
    """

    def __init__(self, pad_width: Any, value: float = 0) -> None:
        super().__init__(None if pad_width is None else [[-a, -b] for a, b in pad_width], value)
