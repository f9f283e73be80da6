"""Convolution of the cells one worker has, into its block of the output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from gpudist.nn.autocast import product_dtype
from gpudist.nn.parameter import tied_empty

_CONVOLVE: dict[int, Callable[..., torch.Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


@dataclass(frozen=True)
class BlockConvolution:
    """The convolution whose outputs are exactly those of one worker.

    Attributes:
        shape: of the block of the output; may be empty.
        stride, dilation: as torch's layer.
        groups: of the block.
        padding: zeros on both sides of what is convolved.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    padding: tuple[int, ...]

    def __call__(
        self, block: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        if 0 in self.shape:
            return tied_empty(self.shape, product_dtype(block), block, weight, bias)
        return _CONVOLVE[len(self.stride)](
            block, weight, bias, self.stride, self.padding, self.dilation, self.groups
        )
