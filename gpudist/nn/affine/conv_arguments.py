"""The arguments of convolutions: torch's, and what is refused of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from gpudist.errors import ShapeError
from gpudist.geometry.padding import CopyingMode, FoldedWindow
from gpudist.geometry.windows import SlidingWindow, Window
from gpudist.nn.affine.conv_parameters import require_groups
from gpudist.nn.windowed.window import per_dim

Paddings = tuple[tuple[int, int], ...]
PADDING_MODES = ("zeros", "reflect", "replicate", "circular")
CAUSAL_PADDING_MODES = ("zeros", "replicate")
_COPYING_MODES: dict[str, CopyingMode] = {"reflect": "reflect", "replicate": "replicate"}


@dataclass
class ConvArguments:
    """The arguments of torch's convolutions, in torch's order and with torch's defaults."""

    in_channels: int
    out_channels: int
    kernel_size: int | Sequence[int]
    stride: int | Sequence[int] = 1
    padding: int | Sequence[int] | Literal["same", "valid"] = 0
    dilation: int | Sequence[int] = 1
    groups: int = 1
    bias: bool = True
    padding_mode: str = "zeros"
    device: torch.device | str | None = None
    dtype: torch.dtype | None = None

    def paddings(
        self, name: str, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
    ) -> Paddings:
        """Cells of padding on both sides, per dim."""
        dims, padding = len(kernel), self.padding
        if padding == "valid":
            return ((0, 0),) * dims
        if padding == "same":
            if any(s != 1 for s in stride):
                raise ShapeError(f"{name}: padding 'same' needs stride 1, not {tuple(stride)}")
            totals = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
            return tuple((total // 2, total - total // 2) for total in totals)
        if isinstance(padding, str):
            raise ShapeError(f"{name}: padding is {padding!r}; use numbers, 'same' or 'valid'")
        return tuple((p, p) for p in per_dim(name, "padding", padding, dims))


@dataclass
class CausalArguments:
    """Those of a convolution whose padding follows from its kernel, so that it is no argument."""

    in_channels: int
    out_channels: int
    kernel_size: int | Sequence[int]
    stride: int | Sequence[int] = 1
    dilation: int | Sequence[int] = 1
    groups: int = 1
    bias: bool = True
    padding_mode: str = "zeros"
    device: torch.device | str | None = None
    dtype: torch.dtype | None = None

    @property
    def padding(self) -> int:
        """What is no argument, and not shown as one."""
        return 0

    def paddings(
        self, name: str, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
    ) -> Paddings:
        """As many cells in front as the kernel reaches back, and none behind."""
        return tuple((d * (k - 1), 0) for k, d in zip(kernel, dilation, strict=True))


def require_supported(
    name: str, given: ConvArguments | CausalArguments, padding_modes: Sequence[str]
) -> None:
    """Refuse what no input could make right.

    Raises:
        ShapeError: an unknown padding mode, or channels that groups do not divide.
    """
    if given.padding_mode not in padding_modes:
        *others, last = map(repr, padding_modes)
        raise ShapeError(
            f"{name}: padding_mode {given.padding_mode!r} is not supported; use "
            f"{', '.join(others)} or {last}"
        )
    require_groups(name, given.in_channels, given.out_channels, given.groups)


def conv_windows(
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    paddings: Paddings,
    padding_mode: str,
) -> list[Window]:
    """What a convolution reads, per dim."""
    windows: list[Window] = []
    for k, s, d, padding in zip(kernel, stride, dilation, paddings, strict=True):
        window = SlidingWindow(k, s, d, padding)
        copying = _COPYING_MODES.get(padding_mode) if any(padding) else None
        windows.append(FoldedWindow(window, copying) if copying is not None else window)
    return windows
