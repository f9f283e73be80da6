"""Local transposed convolution that computes one worker's block of the output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from gpudist.geometry.windows import TransposedWindow
from gpudist.nn.affine.local_conv import (
    convolve_in_float32,
    is_miscomputed,
    number_per_dim,
)
from gpudist.nn.autocast import product_dtype
from gpudist.nn.parameters.parameter import empty_output

_CONVOLVE: dict[int, Callable[..., torch.Tensor]] = {
    1: F.conv_transpose1d,
    2: F.conv_transpose2d,
    3: F.conv_transpose3d,
}


@dataclass(frozen=True)
class TransposedBlock:
    """Transposed convolution that computes exactly one worker's outputs.

    The cells that a worker reads may contribute to more outputs than it owns, or to fewer. Torch's
    padding arguments crop or pad the result at no cost as far as they can; the rest requires a copy
    of the output.

    Attributes:
        shape: shape of the output block.
        reads_input: whether some output reads some cell; otherwise the output is the bias.
        padding, output_padding: arguments for torch, one per dim with a window.
        rest: zeros to add in front and behind, negative to crop; in the order of ``F.pad``.
        stride, dilation: as in the torch layer.
        groups: number of groups in the block.
    """

    shape: tuple[int, ...]
    reads_input: bool
    padding: tuple[int, ...]
    output_padding: tuple[int, ...]
    rest: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the output block for the needed cells ``x`` of shape ``[B, C, *needed]``."""
        if 0 in self.shape:
            return empty_output(self.shape, product_dtype(x), x, weight, bias)
        if not self.reads_input:
            zeros = x.new_zeros(self.shape) + empty_output((0,), x.dtype, x, weight).sum()
            return _with_bias(zeros, bias).to(product_dtype(x))
        adds_zeros = any(cells > 0 for cells in self.rest)
        y = transpose_block(
            x, weight, None if adds_zeros else bias, self.stride, self.padding,
            self.output_padding, self.groups, self.dilation,
        )  # fmt: skip
        if any(self.rest):
            y = F.pad(y, self.rest)
        return _with_bias(y, bias) if adds_zeros else y


def transpose_block(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> torch.Tensor:
    """Convolve a batch as ``torch.conv_transpose1d`` to ``conv_transpose3d``."""
    kernel = weight.shape[2:]
    options = (stride, padding, output_padding, dilation)
    strides, paddings, added, dilations = (number_per_dim(v, len(kernel)) for v in options)
    windows = zip(x.shape[2:], kernel, strides, paddings, added, dilations, strict=True)
    outputs = ((n - 1) * s + d * (k - 1) + 1 - 2 * p + a for n, k, s, p, a, d in windows)
    if is_miscomputed(x, outputs, kernel, dilations, paddings):
        rest = (strides, paddings, dilations, True, added, groups)
        return convolve_in_float32(x, weight, bias, *rest)
    convolve = _CONVOLVE[len(kernel)]
    return convolve(x, weight, bias, strides, paddings, added, groups, dilations)


def transposed_block(
    windows: Sequence[TransposedWindow],
    outputs: Sequence[tuple[int, int]],
    needed: Sequence[tuple[int, int]],
    channels: Sequence[int],
    groups: int,
) -> TransposedBlock:
    """Return the transposed convolution that one worker computes.

    Args:
        windows: one window per feature dim.
        outputs, needed: ranges of output cells and of needed input cells, one per feature dim.
        channels: extents of the output block in batch and channels.
        groups: number of groups in that block.
    """
    fitted = [
        _fit(window, cells, read)
        for window, cells, read in zip(windows, outputs, needed, strict=True)
    ]
    paddings, output_paddings, rests = zip(*fitted, strict=True)
    return TransposedBlock(
        shape=(*channels, *(stop - start for start, stop in outputs)),
        reads_input=all(start < stop for start, stop in needed),
        padding=paddings,
        output_padding=output_paddings,
        rest=tuple(cells for sides in reversed(rests) for cells in sides),
        stride=tuple(window.stride for window in windows),
        dilation=tuple(window.dilation for window in windows),
        groups=groups,
    )


def _fit(
    window: TransposedWindow, outputs: tuple[int, int], needed: tuple[int, int]
) -> tuple[int, int, tuple[int, int]]:
    """Return torch's padding and output padding along one dim, and the rest for each side."""
    first, last = window.reached(*needed)
    left, right = outputs[0] - first, last - outputs[1]
    # Torch crops both sides equally, and extends the end by less than a stride.
    if left >= 0 and 0 <= left - right < window.stride:
        return left, left - right, (0, 0)
    both = max(0, min(left, right))
    return both, 0, (both - left, both - right)


def _with_bias(y: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if bias is None:
        return y
    return y + bias.to(y.dtype).view(-1, *(1,) * (y.dim() - 2))
