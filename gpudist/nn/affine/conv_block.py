"""Local convolution that computes one worker's block of the output."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from gpudist.nn.affine.local_conv import LocalConvolution
from gpudist.nn.autocast import product_dtype
from gpudist.nn.parameters.parameter import empty_output


@dataclass(frozen=True)
class BlockConvolution:
    """Convolution that computes exactly one worker's outputs.

    Attributes:
        shape: shape of the output block; may be empty.
        stride, dilation: as in the torch layer.
        groups: number of groups in the block.
        padding: zeros on both sides of the convolved tensor, per dim.
        convolution: local convolution of a non-empty block.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    padding: tuple[int, ...]
    convolution: LocalConvolution = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        options = self.stride, self.padding, self.dilation, self.groups
        object.__setattr__(self, "convolution", LocalConvolution(*options))

    def __call__(
        self, block: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        if 0 in self.shape:
            return empty_output(self.shape, product_dtype(block), block, weight, bias)
        return self.convolution(block, weight, bias)
