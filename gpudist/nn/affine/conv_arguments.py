"""Arguments of convolutions, checked as in torch."""

from __future__ import annotations

from collections.abc import Sequence

from gpudist.errors import ShapeError
from gpudist.geometry.windows import SlidingWindow, Window
from gpudist.nn.windowed.edge_padding import with_padding_mode
from gpudist.nn.windowed.window import per_dim

Paddings = tuple[tuple[int, int], ...]
PADDING_MODES = ("zeros", "reflect", "replicate", "circular")
CAUSAL_PADDING_MODES = ("zeros", "replicate")


def paddings_of(
    name: str,
    padding: int | Sequence[int] | str,
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
) -> Paddings:
    """Return the cells of padding on both sides of each dim."""
    dims = len(kernel)
    if padding == "valid":
        return ((0, 0),) * dims
    if padding == "same":
        if any(s != 1 for s in stride):
            raise ShapeError(
                f"{name}: padding 'same' needs stride 1, but stride is {tuple(stride)}; use numbers"
            )
        totals = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        return tuple((total // 2, total - total // 2) for total in totals)
    if isinstance(padding, str):
        raise ShapeError(f"{name}: padding is {padding!r}; use numbers, 'same' or 'valid'")
    return tuple((p, p) for p in per_dim(name, "padding", padding, dims))


def require_padding_mode(name: str, padding_mode: str, supported: Sequence[str]) -> None:
    """Raise for an unsupported padding mode."""
    if padding_mode not in supported:
        *others, last = map(repr, supported)
        allowed = f"{', '.join(others)} or {last}" if others else last
        raise ShapeError(f"{name}: padding_mode {padding_mode!r} is not supported; use {allowed}")


def conv_windows(
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    paddings: Paddings,
    padding_mode: str,
) -> list[Window]:
    """Return the window of cells that an output reads along each dim."""
    return [
        with_padding_mode(
            SlidingWindow(k, s, d, padding), padding_mode if any(padding) else "zeros"
        )
        for k, s, d, padding in zip(kernel, stride, dilation, paddings, strict=True)
    ]


def require_groups(name: str, in_channels: int, out_channels: int, groups: int) -> None:
    """Raise if ``groups`` does not divide the numbers of channels."""
    if groups < 1:
        raise ShapeError(f"{name}, dim 1: groups {groups} must be at least 1")
    for what, channels in (("in", in_channels), ("out", out_channels)):
        if channels % groups:
            raise ShapeError(
                f"{name}: {what}_channels {channels} must be divisible by groups {groups}"
            )
